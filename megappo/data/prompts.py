"""Parquet files of prompts -> `Prompt`s, read by row group as they are needed.

Columns: `prompt` (text or chat messages), `data_source`, `ground_truth`; every other column ends up
in `Prompt.extra_info`. Files made for verl are read as they are: `reward_model.ground_truth` stands
in for a missing `ground_truth` column, and the fields of an `extra_info` struct are lifted into
`Prompt.extra_info`, where they win over a column of the same name.

Rows are numbered over all files in the given order. A rank reads only the row groups that its rows
lie in. Left out: other formats and remote paths; convert or download first.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from sys import intern
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megappo.data.parquet import (
    MAX_CACHED_BYTES,
    File,
    RowGroup,
    RowGroupCache,
    read_footer,
    row_groups,
    to_dicts,
)
from megappo.data.render import ChatTokenizer, check_truncation, fit, render
from megappo.errors import DataError
from megappo.types import Prompt

logger = logging.getLogger(__name__)

Files = str | Path | Sequence[str | Path]


def check_files(files: Files, *, prompt_key: str = "prompt", name: str = "train") -> int:
    """Number of rows, after checking every file by its footer alone: quick, before any model.

    Raises:
        DataError: no file is named, or one is missing, not Parquet, without rows or a column.
    """
    return sum(f.metadata.num_rows for f in _open_files(files, prompt_key=prompt_key, name=name))


def read_data_sources(
    files: Files, *, prompt_key: str = "prompt", name: str = "train"
) -> list[str]:
    """Distinct `data_source` values, sorted; only that column is read.

    Raises:
        DataError: as `check_files`, or a row has no data source.
    """
    found: set[str] = set()
    for file in _open_files(files, prompt_key=prompt_key, name=name):
        for group in range(file.metadata.num_row_groups):
            column = file.read(group, columns=["data_source"]).column("data_source")
            if column.null_count:
                raise DataError(
                    f"{file.path}: every row needs a data_source, and {column.null_count} of row "
                    f"group {group} have none; fill them in, as the reward is chosen by it"
                )
            found.update(str(value) for value in column.unique().to_pylist())
    return sorted(found)


class PromptDataset:
    """Usable prompts by position.

    A position counts usable rows. It equals the row number except with truncation `drop`, where the
    rows that are too long are skipped; which they are is found by one pass over the prompt column,
    with the same result on every rank.
    """

    def __init__(
        self,
        files: Files,
        tokenizer: ChatTokenizer,
        *,
        max_prompt_length: int,
        truncation: str,
        prompt_key: str = "prompt",
        name: str = "train",
        template_args: Mapping[str, Any] | None = None,
        max_cached_bytes: int = MAX_CACHED_BYTES,
    ) -> None:
        """Reads the footers only.

        Args:
            files: Parquet files, in order.
            tokenizer: of the policy.
            max_prompt_length: tokens of the final ids.
            truncation: `error`, `left` or `drop`, see `render.fit`.
            prompt_key: the column of prompts.
            name: "train" or "val", for messages.
            template_args: more arguments of the chat template, such as `tools`.
            max_cached_bytes: of decoded row groups kept in memory, see `RowGroupCache`.

        Raises:
            DataError: as `check_files`.
            UserError: an unknown truncation.
        """
        check_truncation(truncation)
        self.name = name
        self._files = _open_files(files, prompt_key=prompt_key, name=name)
        self.num_rows: int = sum(file.metadata.num_rows for file in self._files)
        """Rows in the files, usable or not."""
        self._groups = list(row_groups(self._files))
        self._group_starts = [group.first_row for group in self._groups]
        self._cache = RowGroupCache(max_bytes=max_cached_bytes)
        self._tokenizer = tokenizer
        self._max_length = max_prompt_length
        self._truncation = truncation
        self._prompt_key = prompt_key
        self._template_args = template_args
        self._usable: Sequence[int] | None = None if truncation == "drop" else range(self.num_rows)

    def __len__(self) -> int:
        """Number of usable rows."""
        return len(self.usable_rows())

    @property
    def row_groups_read(self) -> int:
        """Row groups read for prompts so far; one that is read again counts again."""
        return self._cache.num_read

    @property
    def num_dropped(self) -> int:
        """Rows left out as too long."""
        return self.num_rows - len(self)

    def usable_rows(self) -> Sequence[int]:
        """Row number of each position, ascending.

        With truncation `drop` the first call reads and renders every prompt.

        Raises:
            DataError: no row is short enough, or a prompt cannot be rendered.
        """
        if self._usable is None:
            kept = [row for row, ids in self._render_all() if ids is not None]
            logger.info(
                "%s: %d rows read, %d dropped with prompts over %d tokens",
                self.name,
                self.num_rows,
                self.num_rows - len(kept),
                self._max_length,
            )
            if not kept:
                raise DataError(
                    f"{self.name}: {self.num_rows} rows read and all dropped, every prompt is "
                    f"longer than data.max_prompt_length {self._max_length}; raise it, or set "
                    "data.truncation to left"
                )
            self._usable = kept
        return self._usable

    def check_prompts(self) -> None:
        """Renders every prompt once, so that a row that cannot be used is found now.

        Without this pass such a row (too long with truncation `error`, say) ends the run on the
        step that draws it.

        Raises:
            DataError: naming the first such row.
        """
        for _ in self._render_all():
            pass

    def check_ground_truths(self) -> None:
        """Reads the column of ground truths once, so that an empty cell is found now.

        Raises:
            DataError: naming the first row without one.
        """
        for group in self._groups:
            names = group.file.metadata.schema.to_arrow_schema().names
            columns = [n for n in ("ground_truth", "reward_model") if n in names]
            for i, cells in enumerate(to_dicts(group.file.read(group.index, columns=columns))):
                _pop_ground_truth(cells, self._where(group.first_row + i, group))

    def data_sources(self) -> list[str]:
        """See `read_data_sources`."""
        paths = [file.path for file in self._files]
        return read_data_sources(paths, prompt_key=self._prompt_key, name=self.name)

    def source_of_each(self) -> list[str]:
        """The data source of each position, none of which `read_data_sources` refused.

        That column alone is read; equal names are one object.
        """
        names: list[str] = []
        for group in self._groups:
            column = group.file.read(group.index, columns=["data_source"]).column("data_source")
            names += [intern(str(name)) for name in column.to_pylist()]
        return [names[row] for row in self.usable_rows()]

    def rows(self, indices: Sequence[int]) -> list[Prompt]:
        """The prompts at the given positions, in that order.

        Raises:
            DataError: a row cannot be used; the message names it.
        """
        usable = self.usable_rows()
        wanted: dict[int, list[int]] = {}
        for index in indices:
            assert 0 <= index < len(usable), f"position {index} of {len(usable)}"
            row = usable[index]
            wanted.setdefault(bisect_right(self._group_starts, row) - 1, []).append(row)
        prompts: dict[int, Prompt] = {}
        # Group by group, so that a call reads each once however small the cache is.
        for number, rows in sorted(wanted.items()):
            group = self._groups[number]
            distinct = sorted(set(rows))
            table = self._cache.read(group).take([row - group.first_row for row in distinct])
            for row, cells in zip(distinct, to_dicts(table), strict=True):
                prompts[row] = self._prompt(row, cells, group)
        return [prompts[usable[index]] for index in indices]

    def _prompt(self, row: int, cells: dict[str, Any], group: RowGroup) -> Prompt:
        where = self._where(row, group)
        ids = self._ids(cells.pop(self._prompt_key, None), where)
        assert ids is not None, f"{where} was found usable and is too long"
        data_source = cells.pop("data_source", None)
        if not isinstance(data_source, str):
            raise DataError(f"{where}: data_source must be text, not {data_source!r}; fill it in")
        ground_truth = _pop_ground_truth(cells, where)
        nested = cells.get("extra_info")
        if isinstance(nested, dict):
            del cells["extra_info"]
            cells.update(nested)
        return Prompt(
            row=row,
            token_ids=tuple(ids),
            data_source=data_source,
            ground_truth=ground_truth,
            extra_info=cells,
        )

    def _render_all(self) -> Iterator[tuple[int, list[int] | None]]:
        """Row number and fitted ids of every row; reads the prompt column only, past the cache."""
        for group in self._groups:
            table = group.file.read(group.index, columns=[self._prompt_key])
            for i, cells in enumerate(to_dicts(table)):
                row = group.first_row + i
                yield row, self._ids(cells.get(self._prompt_key), self._where(row, group))

    def _ids(self, cell: Any, where: str) -> list[int] | None:
        ids = render(cell, self._tokenizer, where=where, template_args=self._template_args)
        return fit(ids, max_length=self._max_length, truncation=self._truncation, where=where)

    def _where(self, row: int, group: RowGroup) -> str:
        return f"{self.name} row {row} ({group.file.path}, its row {row - group.file.first_row})"


def _open_files(files: Files, *, prompt_key: str, name: str) -> list[File]:
    paths = [Path(files)] if isinstance(files, str | Path) else [Path(f) for f in files]
    if not paths:
        raise DataError(f"{name}: at least one Parquet file is needed; set data.{name}_files")
    opened: list[File] = []
    first_row = 0
    for path in paths:
        metadata = read_footer(path, name)
        _check_columns(path, metadata, prompt_key=prompt_key, name=name)
        opened.append(File(path=path, metadata=metadata, first_row=first_row))
        first_row += metadata.num_rows
    return opened


def _check_columns(path: Path, metadata: pq.FileMetaData, *, prompt_key: str, name: str) -> None:
    schema = metadata.schema.to_arrow_schema()
    missing = [c for c in (prompt_key, "data_source") if c not in schema.names]
    if "ground_truth" not in schema.names and not _has_nested_ground_truth(schema):
        missing.append("ground_truth")
    if missing:
        raise DataError(
            f"{name} file {path} needs the columns {prompt_key}, data_source and ground_truth (or "
            f"reward_model.ground_truth); missing: {', '.join(missing)}; found: "
            f"{', '.join(schema.names)}. Convert the file (`megappo data gsm8k` for GSM8K), or set "
            "data.prompt_key if the prompt has another name"
        )


def _has_nested_ground_truth(schema: pa.Schema) -> bool:
    if "reward_model" not in schema.names:
        return False
    kind = schema.field("reward_model").type
    return bool(pa.types.is_struct(kind) and kind.get_field_index("ground_truth") >= 0)


def _pop_ground_truth(cells: dict[str, Any], where: str) -> str:
    """The truth as text: as it is, or as JSON where the cell is a list or struct."""
    truth = cells.pop("ground_truth", None)
    nested = cells.get("reward_model")
    if truth is None and isinstance(nested, dict):
        truth = nested.pop("ground_truth", None)
    if truth is None:
        raise DataError(
            f"{where}: ground_truth is empty; fill it in, with an empty text if no reward needs it"
        )
    return json.dumps(truth, ensure_ascii=False) if isinstance(truth, list | dict) else str(truth)
