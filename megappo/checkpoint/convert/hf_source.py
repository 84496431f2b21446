"""Tensors of a Hugging Face folder, read by rows; damage is found before anything is written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megappo.checkpoint.convert.raw import BLOCK_BYTES, RawFile, num_bytes
from megappo.errors import ModelError
from megappo.models.spec import INDEX_FILE, WEIGHTS_FILE

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
"""Kinds of weights that are converted, by their names in safetensors."""
_MAX_HEADER_BYTES = 100 * 10**6
"""The limit of the safetensors library."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Where a tensor lies."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """Of its first byte in the file."""


class HFTensors:
    """A `TensorReader` that holds no file in memory.

    Args:
        folder: Has `model.safetensors`, or several files and their index.

    Raises:
        ModelError: a file is missing, cut off or no safetensors, the index and the files do not
            agree, or a tensor is of a kind that is not converted.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._stack = ExitStack()
        self._files: dict[str, RawFile] = {}
        index = self.folder / INDEX_FILE
        if index.is_file():
            weight_map = _read_index(index)
            files = sorted(set(weight_map.values()))
        else:
            weight_map, files = {}, [WEIGHTS_FILE]
        self._stored: dict[str, Stored] = {}
        try:
            for file in files:
                self._open(file)
            if weight_map:
                self._check_index(index, weight_map)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> HFTensors:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def names(self) -> set[str]:
        """Every tensor that the folder has."""
        return set(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a tensor."""
        return self._stored[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor."""
        return self._stored[name].dtype

    def read(self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows (`dim` 0) or columns (`dim` 1) from `start` to `stop`, by default all of them."""
        stored = self._stored[name]
        file = self._files[stored.file]
        if dim == 0:
            return file.read_rows(stored.offset, stored.shape, stored.dtype, start, stop)
        return file.read_rows(stored.offset, stored.shape, stored.dtype)[:, start:stop]

    def blocks(self, name: str) -> Iterator[Tensor]:
        """A tensor by rows, in order."""
        shape, dtype = self.shape(name), self.dtype(name)
        if not shape:
            yield self.read(name)
            return
        step = max(1, BLOCK_BYTES // max(num_bytes(shape[1:], dtype), 1))
        for start in range(0, shape[0], step):
            yield self.read(name, start=start, stop=start + step)

    def _open(self, file: str) -> None:
        path = self.folder / file
        if not path.is_file():
            raise ModelError(f"{path} is missing; download the folder again")
        raw = self._files[file] = self._stack.enter_context(RawFile(path))
        for name, stored in read_header(raw).items():
            if name in self._stored:
                raise ModelError(
                    f"{self.folder} has the tensor {name} twice: in {self._stored[name].file} and "
                    f"in {file}; remove one"
                )
            self._stored[name] = stored

    def _check_index(self, index: Path, weight_map: dict[str, str]) -> None:
        found = {name: stored.file for name, stored in self._stored.items()}
        for name, file in sorted(weight_map.items()):
            if found.get(name) != file:
                where = f"it is in {found[name]}" if name in found else "no file has it"
                raise ModelError(
                    f"{index} says that {name} is in {file}, but {where}; download the folder again"
                )
        unlisted = sorted(found.keys() - weight_map.keys())
        if unlisted:
            raise ModelError(
                f"{index} does not list {len(unlisted)} tensors of the files, among them "
                f"{', '.join(unlisted[:5])}; download the folder again"
            )


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is no index of weights: {error!r}") from error


def read_header(file: RawFile) -> dict[str, Stored]:
    """The tensors of one safetensors file.

    Format: 8 bytes little-endian length, a JSON header of that length, the tensors' bytes.

    Raises:
        ModelError: cut off, no safetensors, or with tensors that are not converted.
    """
    length = int.from_bytes(file.read_bytes(0, 8), "little")
    if file.num_bytes < 8 or not 2 <= length <= min(_MAX_HEADER_BYTES, file.num_bytes - 8):
        raise ModelError(
            f"{file.path} is no safetensors file, or is cut off ({file.num_bytes} bytes); "
            "download it again"
        )
    try:
        header: dict[str, Any] = json.loads(file.read_bytes(8, length))
        header.pop("__metadata__", None)
        tensors = {name: _stored(file, name, entry, 8 + length) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"the header of {file.path} cannot be read: {error}; download it again"
        ) from error
    end = max((s.offset + num_bytes(s.shape, s.dtype) for s in tensors.values()), default=8)
    if end != max(file.num_bytes, 8 + length):
        raise ModelError(
            f"{file.path} has {file.num_bytes} bytes, but its tensors end at byte {end}: the file "
            "is cut off or damaged; download it again"
        )
    return tensors


def _stored(file: RawFile, name: str, entry: dict[str, Any], base: int) -> Stored:
    if entry["dtype"] not in DTYPES:
        raise ModelError(
            f"{file.path}: {name} is of the kind {entry['dtype']}; converted are "
            f"{', '.join(DTYPES)}: use the model with plain weights"
        )
    shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
    start, end = entry["data_offsets"]
    if end - start != num_bytes(shape, dtype):
        raise ModelError(f"{file.path}: the header gives {name} a wrong size; download it again")
    return Stored(file=file.path.name, shape=shape, dtype=dtype, offset=base + start)
