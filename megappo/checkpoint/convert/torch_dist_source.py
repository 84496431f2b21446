"""Tensors of a torch_dist checkpoint: any box of any of them, in one process without a group."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megappo.checkpoint.convert.dcp_format import Archived, load_metadata, locate
from megappo.checkpoint.convert.disk_names import Piece
from megappo.checkpoint.convert.raw import RawFile, num_bytes
from megappo.errors import CheckpointError

METADATA_FILE = ".metadata"
CONFIG_FILE = "metadata.json"
COMMON_FILE = "common.pt"


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a tensor and the archive that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    """Of the archive in the file, as is `length` in bytes."""
    length: int


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of the checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class TorchDistTensors:
    """The tensors by the names that they have on disk.

    Args:
        folder: With `.metadata` and the `.distcp` files.

    Raises:
        CheckpointError: a file is missing or shorter than `.metadata` says, or the format is not
            known.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _check_backend(folder)
        metadata = load_metadata((folder / METADATA_FILE).read_bytes())
        tensors, self.objects = _read_entries(metadata, folder)
        self.tensors = _without_prefix(tensors)
        self._stack = ExitStack()
        self._files: dict[str, RawFile] = {}
        self._located: dict[tuple[str, int], Archived] = {}
        self._entries: dict[tuple[str, int], dict[tuple[int, ...], list[Chunk]]] = {}
        self._check_files()

    def __enter__(self) -> TorchDistTensors:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        self._files.clear()

    @property
    def keys(self) -> set[str]:
        """Names on disk."""
        return set(self.tensors)

    def shape(self, piece: Piece) -> tuple[int, ...]:
        """Of what a piece names, without the dims that its index takes away."""
        return self.tensors[piece.key].shape[len(piece.index) :]

    def leading_shape(self, piece: Piece) -> tuple[int, ...]:
        """Sizes of the dims that a piece's index takes away."""
        return self.tensors[piece.key].shape[: len(piece.index)]

    def dtype(self, piece: Piece) -> torch.dtype:
        """Of a piece."""
        return self.tensors[piece.key].dtype

    def read(self, piece: Piece, start: int, stop: int) -> Tensor:
        """Rows from `start` to `stop` of a piece.

        Raises:
            CheckpointError: a file is damaged, or no file has some of the elements.
        """
        tensor = self.tensors[piece.key]
        shape = self.shape(piece)
        if not shape:
            start, stop, shape = 0, 1, (1,)
        out = torch.empty((max(stop - start, 0), *shape[1:]), dtype=tensor.dtype)
        filled = 0
        for chunk in self._chunks_of(piece):
            filled += self._copy(chunk, piece, start, stop, out)
        if filled != out.numel():
            raise CheckpointError(
                f"{self.folder}: the files have {filled} of {out.numel()} elements of {piece.key} "
                f"{list(tensor.shape)}; copy the checkpoint again"
            )
        return out.reshape(()) if not self.shape(piece) else out

    def _chunks_of(self, piece: Piece) -> Sequence[Chunk]:
        """Those that may hold a piece; a stack of layers and experts has thousands that do not."""
        chunks, depth = self.tensors[piece.key].chunks, len(piece.index)
        if (piece.key, depth) not in self._entries:
            entries: dict[tuple[int, ...], list[Chunk]] = defaultdict(list)
            if all(set(chunk.sizes[:depth]) <= {1} for chunk in chunks):
                for chunk in chunks:
                    entries[chunk.offsets[:depth]].append(chunk)
            self._entries[piece.key, depth] = dict(entries)
        known = self._entries[piece.key, depth]
        return known.get(piece.index, ()) if known else chunks

    def _copy(self, chunk: Chunk, piece: Piece, start: int, stop: int, out: Tensor) -> int:
        """Fills the part of `out` that the chunk has; returns its number of elements."""
        depth = len(piece.index)
        entry = 0  # of the leading dims of the chunk, flattened
        for i, o, s in zip(piece.index, chunk.offsets, chunk.sizes, strict=False):
            if not o <= i < o + s:
                return 0
            entry = entry * s + i - o
        offsets, sizes = chunk.offsets[depth:] or (0,), chunk.sizes[depth:] or (1,)
        first, last = max(start, offsets[0]), min(stop, offsets[0] + sizes[0])
        if first >= last:
            return 0
        where = [slice(first - start, last - start)]
        where += [slice(o, o + s) for o, s in zip(offsets[1:], sizes[1:], strict=True)]
        begin = entry * sizes[0] + first - offsets[0]
        rows = _product(chunk.sizes[:depth]) * sizes[0]
        target = out[tuple(where)]
        self._read_rows(chunk, (rows, *sizes[1:]), begin, target)
        return int(target.numel())

    def _read_rows(self, chunk: Chunk, shape: tuple[int, ...], begin: int, target: Tensor) -> None:
        """Rows from `begin` on of a chunk seen as `shape`, into `target`."""
        file = self._open(chunk.file)
        found = self._locate(file, chunk, target.dtype)
        if not found.is_contiguous:
            size = 1 + sum((n - 1) * s for n, s in zip(found.shape, found.stride, strict=True))
            flat = file.read_rows(found.offset, (size,), found.dtype)
            full = flat.as_strided(found.shape, found.stride).reshape(shape)
            target.copy_(full[begin : begin + len(target)])
            return
        offset = found.offset + begin * num_bytes(shape[1:], found.dtype)
        if target.is_contiguous():
            file.read_into(target, offset)
        else:
            target.copy_(file.read_rows(offset, tuple(target.shape), found.dtype))

    def _locate(self, file: RawFile, chunk: Chunk, dtype: torch.dtype) -> Archived:
        key = (chunk.file, chunk.offset)
        if key not in self._located:
            found = locate(file, chunk.offset, chunk.length)
            if found.dtype != dtype or _product(found.shape) != _product(chunk.sizes):
                raise CheckpointError(
                    f"{file.path}: .metadata describes {dtype} {list(chunk.sizes)} at byte "
                    f"{chunk.offset}, but {found.dtype} {list(found.shape)} is there; copy the "
                    "checkpoint again"
                )
            self._located[key] = found
        return self._located[key]

    def _open(self, file: str) -> RawFile:
        if file not in self._files:
            self._files[file] = self._stack.enter_context(RawFile(self.folder / file))
        return self._files[file]

    def _check_files(self) -> None:
        """Compares sizes, so that a copy that was cut short is found at once."""
        ends: dict[str, int] = {}
        for tensor in self.tensors.values():
            for chunk in tensor.chunks:
                ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
        for file, end in sorted(ends.items()):
            path = self.folder / file
            if not path.is_file():
                raise CheckpointError(
                    f"{path} is missing, which .metadata names; copy the checkpoint again"
                )
            size = path.stat().st_size
            if size < end:
                raise CheckpointError(
                    f"{path} has {size} bytes, but .metadata needs {end}: the file is cut off; "
                    "copy the checkpoint again"
                )


_LANDMARK = "decoder.final_layernorm.weight"
_PREFIXES = ("model.", "module.")
"""Before every weight in FSDP's checkpoints, and where Megatron's model was wrapped when saved."""


def _without_prefix(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    for prefix in _PREFIXES:
        if prefix + _LANDMARK in tensors:
            return {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}
    return tensors


def _product(sizes: tuple[int, ...]) -> int:
    return math.prod(sizes)


def _check_backend(folder: Path) -> None:
    """Refuses what says of itself that it is another format; FSDP's checkpoints say nothing."""
    config = folder / CONFIG_FILE
    if not config.is_file():
        return
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
        backend, version = content["sharded_backend"], content.get("sharded_backend_version", 1)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{config} cannot be read: {error!r}") from error
    if (backend, version) != ("torch_dist", 1):
        raise CheckpointError(
            f"{folder} has the format {backend} version {version}, which is not read; load it in "
            "Megatron-LM and save it with --ckpt-format torch_dist"
        )


def _read_entries(metadata: Any, folder: Path) -> tuple[dict[str, StoredTensor], set[str]]:
    """Tensors, and names of the entries that are pickled objects."""
    places = {
        (index.fqn, None if index.offset is None else tuple(index.offset)): info
        for index, info in (metadata.storage_data or {}).items()
    }
    tensors: dict[str, StoredTensor] = {}
    objects: set[str] = set()
    for key, entry in metadata.state_dict_metadata.items():
        if type(entry).__name__ != "TensorStorageMetadata":
            objects.add(key)
            continue
        chunks = []
        for chunk in entry.chunks:
            offsets = tuple(chunk.offsets)
            info = places.get((key, offsets))
            if info is None:
                raise CheckpointError(
                    f"{folder / METADATA_FILE} does not say where {key} at {list(offsets)} lies"
                )
            if getattr(info, "transform_descriptors", None):
                raise CheckpointError(
                    f"{folder}: {key} is stored transformed ({info.transform_descriptors}), which "
                    "is not supported"
                )
            chunks.append(
                Chunk(
                    offsets=offsets,
                    sizes=tuple(chunk.sizes),
                    file=str(info.relative_path),
                    offset=info.offset,
                    length=info.length,
                )
            )
        tensors[key] = StoredTensor(
            shape=tuple(entry.size), dtype=entry.properties.dtype, chunks=tuple(chunks)
        )
    return tensors, objects
