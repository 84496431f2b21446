"""Parquet rows of a prompt and answers to it -> token ids: preference pairs, and answers to learn.

A cell is text or chat messages. A prompt becomes the very ids that a rollout would be given
(`render`), an answer its text and the tokenizer's end token: what is learnt here is what PPO's
samples look like, and a reward model sees answers as it will score them.

An answer of messages is one assistant message, or a whole conversation whose last message is the
answer; what stands before it is then the prompt, and must agree with the prompt column if there is
one. Rows are numbered over all files. Left out: several turns of answers, and ranks of more than
two answers.

Rows that are too long, and pairs of equal answers, are left out and counted. That takes one look at
every row, `scan`: ranks share the rows out.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.data.parquet import (
    MAX_CACHED_BYTES,
    File,
    RowGroup,
    RowGroupCache,
    read_footer,
    row_groups,
    to_dicts,
)
from megappo.data.render import ChatTokenizer, render, to_plain
from megappo.errors import DataError
from megappo.types import Completion, Prompt, RolloutBatch, collate


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which columns a row is made of."""

    prompt: str
    """empty: answers are whole conversations"""
    answers: tuple[str, ...]
    """one, or the better and the worse"""
    margin: str = ""
    """of numbers; empty: none"""

    @property
    def all(self) -> list[str]:
        """Those that are read."""
        return [name for name in (self.prompt, *self.answers, self.margin) if name]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One usable row."""

    row: int
    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    """token ids of each answer, the end token included"""
    margin: float

    @property
    def lengths(self) -> list[int]:
        """Tokens of the prompt with each answer."""
        return [len(self.prompt) + len(answer) for answer in self.answers]


@dataclass(frozen=True, kw_only=True)
class Scan:
    """What a look at some rows found."""

    rows: tuple[int, ...] = ()
    """usable, ascending"""
    num_too_long: int = 0
    num_equal: int = 0
    problem: str = ""
    """of the first row that cannot be used at all"""

    @classmethod
    def merged(cls, parts: Sequence[Scan]) -> Scan:
        """Of all ranks."""
        problems = [part.problem for part in parts if part.problem]
        return cls(
            rows=tuple(sorted(row for part in parts for row in part.rows)),
            num_too_long=sum(part.num_too_long for part in parts),
            num_equal=sum(part.num_equal for part in parts),
            problem=problems[0] if problems else "",
        )


class ExampleDataset:
    """Usable rows by position, once `use` has said which they are."""

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: ChatTokenizer,
        *,
        columns: Columns,
        max_length: int,
        too_long: str,
        name: str = "train",
        max_cached_bytes: int = MAX_CACHED_BYTES,
    ) -> None:
        """Reads the footers only.

        Args:
            files: Parquet files, in order.
            tokenizer: of the model.
            columns: what a row is made of.
            max_length: most tokens of a prompt and one answer.
            too_long: `drop` or `error`.
            name: "train" or "val", for messages.
            max_cached_bytes: of decoded row groups kept in memory, see `RowGroupCache`.

        Raises:
            DataError: a file is missing, not Parquet, without rows or a column; or the tokenizer
                has no end token.
        """
        self.name = name
        self._end = _end_token(tokenizer)
        self._files = open_files(files, columns, name)
        self._groups = list(row_groups(self._files))
        self._starts = [group.first_row for group in self._groups]
        self._tokenizer = tokenizer
        self._columns = columns
        self._max_length = max_length
        self._stops = too_long == "error"
        self._cache = RowGroupCache(columns=columns.all, max_bytes=max_cached_bytes)
        self._usable: Scan | None = None

    def __len__(self) -> int:
        return len(self.found.rows)

    @property
    def num_rows(self) -> int:
        """Rows in the files, usable or not."""
        return sum(file.metadata.num_rows for file in self._files)

    @property
    def row_groups_read(self) -> int:
        """For examples, so far; one that is read again counts again."""
        return self._cache.num_read

    @property
    def found(self) -> Scan:
        """What `use` was given."""
        assert self._usable is not None, "the rows must be scanned first"
        return self._usable

    @property
    def is_scanned(self) -> bool:
        """Whether `use` was called."""
        return self._usable is not None

    @property
    def in_words(self) -> str:
        """Usable rows, and why others are left out."""
        equal = f", {self.found.num_equal} with equal answers" if self._is_pairs else ""
        return (
            f"{len(self)} of {self.num_rows} {self.name} rows ({self.found.num_too_long} over "
            f"data.max_length{equal} left out)"
        )

    def scan(self, *, rank: int, world_size: int) -> Scan:
        """Looks at every row of this rank's share of the rows. No communication.

        A share is consecutive rows and may end within a row group: of a single large one each rank
        decodes all, and tokenizes its own part.
        """
        first, end = (self.num_rows * r // world_size for r in (rank, rank + 1))
        kept: list[int] = []
        too_long = equal = 0
        try:
            for group, row, cells in self._cells(first, end):
                example = self._example(group, row, cells)
                if self._is_too_long(example, group):
                    too_long += 1
                elif self._is_pairs and example.answers[0] == example.answers[1]:
                    equal += 1
                else:
                    kept.append(row)
        except DataError as error:
            return Scan(problem=str(error))
        return Scan(rows=tuple(kept), num_too_long=too_long, num_equal=equal)

    def use(self, scans: Sequence[Scan]) -> None:
        """Takes up what all ranks have found.

        Raises:
            DataError: a row cannot be used, or none is left.
        """
        merged = Scan.merged(scans)
        if merged.problem:
            raise DataError(merged.problem)
        self._usable = merged
        if not merged.rows:
            raise DataError(
                f"no row is left of {self.in_words}: raise data.max_length "
                f"({self._max_length}), or mend the files"
            )

    def examples(self, positions: Sequence[int]) -> list[Example]:
        """The rows at the given positions, in that order; reads only their row groups."""
        wanted = [self.found.rows[position] for position in positions]
        made: dict[int, Example] = {}
        for row in sorted(set(wanted)):
            group = self._groups[bisect_right(self._starts, row) - 1]
            (cells,) = to_dicts(self._cache.read(group).slice(row - group.first_row, 1))
            made[row] = self._example(group, row, cells)
        return [made[row] for row in wanted]

    def _cells(self, first: int, end: int) -> Iterator[tuple[RowGroup, int, dict[str, Any]]]:
        """The rows from `first` to before `end` with their group, read past the cache."""
        for group in self._groups:
            rows = range(max(first, group.first_row), min(end, group.end_row))
            if not rows:
                continue
            table = group.file.read(group.index, columns=self._columns.all)
            part = table.slice(rows.start - group.first_row, len(rows))
            for row, cells in zip(rows, to_dicts(part), strict=True):
                yield group, row, cells

    @property
    def _is_pairs(self) -> bool:
        return len(self._columns.answers) > 1

    def _is_too_long(self, example: Example, group: RowGroup) -> bool:
        longest = max(example.lengths)
        if longest > self._max_length and self._stops:
            raise DataError(
                f"{self._where(example.row, group)}: prompt and answer have {longest} tokens, more "
                f"than data.max_length {self._max_length}; raise it, or set data.too_long=drop"
            )
        return longest > self._max_length

    def _example(self, group: RowGroup, row: int, cells: dict[str, Any]) -> Example:
        where = self._where(row, group)
        columns = self._columns
        prompt = cells.get(columns.prompt) if columns.prompt else None
        answers = []
        for name in columns.answers:
            prompt, text = split_answer(cells.get(name), prompt, where=f"{where}, column {name}")
            answers.append(text)
        if prompt is None:
            raise DataError(
                f"{where}: there is no prompt: set data.prompt_key to its column, or give answers "
                "as whole conversations"
            )
        ids = render(prompt, self._tokenizer, where=f"{where}, column {columns.prompt or 'prompt'}")
        return Example(
            row=row,
            prompt=tuple(ids),
            answers=tuple(self._answer(text) for text in answers),
            margin=_margin(cells.get(columns.margin), columns, where) if columns.margin else 0.0,
        )

    def _answer(self, text: str) -> tuple[int, ...]:
        return (*self._tokenizer.encode(text, add_special_tokens=False), self._end)

    def _where(self, row: int, group: RowGroup) -> str:
        return f"{self.name} row {row} ({group.file.path}, its row {row - group.file.first_row})"


def split_answer(cell: Any, prompt: Any, *, where: str) -> tuple[Any, str]:
    """(prompt, text of the answer) of one answer cell.

    Args:
        cell: text, one assistant message in a list, or a whole conversation.
        prompt: text or messages, None if the answer must bring it.
        where: names file, row and column in errors.

    Raises:
        DataError: it is none of them, or a conversation that begins otherwise than the prompt.
    """
    cell, prompt = to_plain(cell), to_plain(prompt)
    if isinstance(cell, str):
        return prompt, cell
    if not isinstance(cell, list) or not cell or not all(_is_message(m) for m in cell):
        raise DataError(
            f"{where}: an answer must be text or messages of text, not {str(cell)[:60]!r}; mend "
            "the row, or set data.chosen_key and data.rejected_key to the right columns"
        )
    head, last = cell[:-1], cell[-1]
    if last["role"] != "assistant":
        raise DataError(
            f"{where}: the last message must be the assistant's answer, its role is "
            f"{last['role']!r}; mend the row"
        )
    if not head:
        return prompt, str(last["content"])
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if given is not None and given != head:
        raise DataError(
            f"{where}: the conversation begins otherwise than the row's prompt: "
            f"{str(head)[:80]!r}, not {str(given)[:80]!r}; mend the row, or give the answer alone"
        )
    return head, str(last["content"])


def as_samples(examples: Sequence[Example]) -> RolloutBatch:
    """One sample an answer, those of a row one after another; margins in `extra_info`."""
    prompts, completions = [], []
    for example in examples:
        prompt = Prompt(
            row=example.row,
            token_ids=example.prompt,
            data_source="",
            ground_truth="",
            extra_info={"margin": example.margin},
        )
        for answer in example.answers:
            prompts.append(prompt)
            completions.append(
                Completion(
                    token_ids=answer,
                    log_probs=(0.0,) * len(answer),
                    finish_reason="stop",
                    text="",
                )
            )
    return collate(prompts, completions)


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
    )


def _margin(cell: Any, columns: Columns, where: str) -> float:
    if isinstance(cell, bool) or not isinstance(cell, int | float) or not math.isfinite(cell):
        raise DataError(
            f"{where}, column {columns.margin}: a margin must be a number, not {cell!r}; mend the "
            "row, or leave data.margin_key out"
        )
    return float(cell)


def _end_token(tokenizer: Any) -> int:
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end token, and an answer must end with one: set eos_token in "
            "tokenizer_config.json"
        )
    return int(tokenizer.eos_token_id)


def open_files(files: Sequence[str | Path], columns: Columns, name: str) -> list[File]:
    """The files with their footers, numbered on. No row is read, and no tokenizer needed.

    Args:
        files: Parquet files, in order.
        columns: that all must have.
        name: "train" or "val", for messages.

    Raises:
        DataError: a file is missing, not Parquet, without rows or a column.
    """
    opened: list[File] = []
    first_row = 0
    for path in map(Path, files):
        metadata = read_footer(path, name)
        found = metadata.schema.to_arrow_schema().names
        missing = [column for column in columns.all if column not in found]
        if missing:
            raise DataError(
                f"{name} file {path} lacks the columns {', '.join(missing)}; found: "
                f"{', '.join(found)}. Set data.prompt_key, data.chosen_key, data.rejected_key or "
                "data.margin_key to the right ones"
            )
        opened.append(File(path=path, metadata=metadata, first_row=first_row))
        first_row += metadata.num_rows
    return opened
