"""Parquet files, read by row group: what prompts and preference pairs share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megappo.data.render import to_plain
from megappo.errors import DataError

MAX_CACHED_BYTES = 2**30
"""Decoded rows that a data set keeps in memory on each rank."""


@dataclass(frozen=True, kw_only=True)
class File:
    """One file whose footer has been read."""

    path: Path
    metadata: pq.FileMetaData
    first_row: int
    """Over all files."""

    def read(self, group: int, columns: list[str] | None = None) -> pa.Table:
        """A row group, whole or some columns of it.

        Raises:
            DataError: it cannot be read.
        """
        try:
            with pq.ParquetFile(self.path, metadata=self.metadata) as parquet:
                return parquet.read_row_group(group, columns=columns)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(
                f"{self.path}: row group {group} cannot be read: {error}; the file is damaged or "
                "has changed since the start, write it again"
            ) from error


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """One row group of one of the files."""

    file: File
    index: int
    """Within its file."""
    first_row: int
    """Over all files."""

    @property
    def end_row(self) -> int:
        """The row after its last one."""
        return self.first_row + int(self.file.metadata.row_group(self.index).num_rows)


class RowGroupCache:
    """Reads row groups, and keeps the decoded rows of as many as fit.

    Rows that are shuffled over all groups need most groups in every step, in ascending order. If
    the group used longest ago made room for a new one, as is usual, it would always be the next one
    needed. So the group used last does, and all but a few stay.
    """

    def __init__(self, *, columns: list[str] | None = None, max_bytes: int) -> None:
        """Nothing is read yet.

        Args:
            columns: that are read; None for all.
            max_bytes: of decoded tables, but one table is always kept.
        """
        self.num_read = 0
        """Row groups read so far; one that is read again counts again."""
        self._columns = columns
        self._max_bytes = max_bytes
        self._bytes = 0
        self._tables: OrderedDict[tuple[Path, int], pa.Table] = OrderedDict()

    def read(self, group: RowGroup) -> pa.Table:
        """The row group, from memory or from its file.

        Raises:
            DataError: it cannot be read.
        """
        place = (group.file.path, group.index)
        if place in self._tables:
            self._tables.move_to_end(place)
            return self._tables[place]
        table = group.file.read(group.index, columns=self._columns)
        self.num_read += 1
        self._bytes += table.nbytes
        while self._tables and self._bytes > self._max_bytes:
            _, last = self._tables.popitem()
            self._bytes -= last.nbytes
        self._tables[place] = table
        return table


def read_footer(path: Path, name: str) -> pq.FileMetaData:
    """Footer of a file of `data.<name>_files`.

    Raises:
        DataError: it is missing, not Parquet, or without rows.
    """
    if not path.is_file():
        raise DataError(f"{name} file {path} does not exist; check data.{name}_files")
    try:
        metadata = pq.read_metadata(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(
            f"{name} file {path} must be Parquet: {error}; convert it, or check data.{name}_files"
        ) from error
    if metadata.num_rows == 0:
        raise DataError(f"{name} file {path} has 0 rows; remove it from data.{name}_files")
    return metadata


def row_groups(files: Sequence[File]) -> Iterator[RowGroup]:
    """Every row group that has rows, in order."""
    for file in files:
        first_row = file.first_row
        for index in range(file.metadata.num_row_groups):
            num_rows = file.metadata.row_group(index).num_rows
            if num_rows:
                yield RowGroup(file=file, index=index, first_row=first_row)
            first_row += num_rows


def to_dicts(table: pa.Table) -> list[dict[str, Any]]:
    """Rows as plain Python values."""
    return [to_plain(cells) for cells in table.to_pylist(maps_as_pydicts="strict")]
