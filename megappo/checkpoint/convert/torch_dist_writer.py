"""Writes tensors as torch's distributed checkpoint does, one after the other and without a group.

`.distcp` files are `torch.save` archives end to end, one a chunk; `.metadata` says which chunk of
which tensor lies where. Beside them Megatron wants `metadata.json`, which names the format, and
`common.pt`, which holds what is small and equal on all ranks.
"""

from __future__ import annotations

import io
import json
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
from torch import Tensor

from megappo.checkpoint.convert.torch_dist_source import (
    COMMON_FILE,
    CONFIG_FILE,
    METADATA_FILE,
    Chunk,
    StoredTensor,
)

ARCHIVE_BYTES = 2048
"""What an archive adds to its tensor, at most."""


@dataclass(frozen=True, kw_only=True)
class WrittenChunk:
    """A chunk that is in a file."""

    key: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    chunk: Chunk


@dataclass(frozen=True, kw_only=True)
class WrittenObject:
    """A pickled object that is in a file."""

    key: str
    file: str
    offset: int
    length: int


Written = WrittenChunk | WrittenObject


class DistcpFiles:
    """The `.distcp` files of one part of a checkpoint, open for writing."""

    def __init__(self, folder: Path, part: int) -> None:
        self._folder, self._part = folder, part
        self._stack = ExitStack()
        self._open: dict[int, IO[bytes]] = {}
        self.written: list[Written] = []

    def __enter__(self) -> DistcpFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def add(
        self, slot: int, key: str, shape: tuple[int, ...], offsets: tuple[int, ...], tensor: Tensor
    ) -> None:
        """Appends a chunk to a file.

        Args:
            slot: Number of the file among those of this part.
            key: Name of the tensor.
            shape: Of the whole tensor.
            offsets: Of the chunk in it.
            tensor: The chunk, with as many dims as `shape`.
        """
        file, stream = self._file(slot)
        offset = stream.tell()
        # torch.save writes the whole memory that a view is a part of.
        if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        _save(tensor, stream)
        chunk = Chunk(
            offsets=offsets,
            sizes=tuple(tensor.shape),
            file=file,
            offset=offset,
            length=stream.tell() - offset,
        )
        self.written.append(WrittenChunk(key=key, shape=shape, dtype=tensor.dtype, chunk=chunk))

    def add_objects(self, keys: Iterable[str], content: bytes) -> None:
        """Appends the same pickled object under several names."""
        file, stream = self._file(0)
        for key in keys:
            offset = stream.tell()
            stream.write(content)
            self.written.append(
                WrittenObject(key=key, file=file, offset=offset, length=len(content))
            )

    def _file(self, slot: int) -> tuple[str, IO[bytes]]:
        name = f"__{self._part}_{slot}.distcp"
        if slot not in self._open:
            self._open[slot] = self._stack.enter_context((self._folder / name).open("wb"))
        return name, self._open[slot]


def _save(tensor: Tensor, stream: IO[bytes]) -> None:
    """`torch.save`, whose writer hides a full disk behind a RuntimeError about positions."""
    try:
        torch.save(tensor, stream)
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        raise cause or error from error


def saved_bytes(content: Any) -> bytes:
    """An object as `torch.save` writes it."""
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def write_metadata(folder: Path, written: Iterable[Written], common: Mapping[str, Any]) -> None:
    """Writes the three small files.

    Args:
        folder: That has the `.distcp` files.
        written: All that is in them.
        common: Content of `common.pt`.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    written = list(written)
    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for key, tensor in gather_chunks(written).items():
        entries[key] = TensorStorageMetadata(
            properties=TensorProperties(dtype=tensor.dtype),
            size=torch.Size(tensor.shape),
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(c.offsets), sizes=torch.Size(c.sizes))
                for c in tensor.chunks
            ],
        )
        for i, c in enumerate(tensor.chunks):
            index = MetadataIndex(key, torch.Size(c.offsets), i)
            places[index] = _StorageInfo(c.file, c.offset, c.length)
    for item in written:
        if isinstance(item, WrittenObject):
            entries[item.key] = BytesStorageMetadata()
            places[MetadataIndex(item.key)] = _StorageInfo(item.file, item.offset, item.length)
    metadata = Metadata(
        state_dict_metadata=entries, storage_data=places, storage_meta=StorageMeta()
    )
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    torch.save(dict(common), folder / COMMON_FILE)
    config = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config))


def gather_chunks(written: Iterable[Written]) -> dict[str, StoredTensor]:
    """The tensors that chunks make up."""
    chunks: dict[str, list[WrittenChunk]] = defaultdict(list)
    for item in written:
        if isinstance(item, WrittenChunk):
            chunks[item.key].append(item)
    return {
        key: StoredTensor(
            shape=found[0].shape, dtype=found[0].dtype, chunks=tuple(c.chunk for c in found)
        )
        for key, found in chunks.items()
    }
