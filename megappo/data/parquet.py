"""Parquet files, read by row group: what prompts and preference pairs share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megappo.data.render import to_plain
from megappo.errors import DataError


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
