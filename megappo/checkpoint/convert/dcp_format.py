"""The two pickles of torch's distributed checkpoint, read without running what is in them.

`.metadata` is one pickle; each tensor is a `torch.save` archive of its own inside a `.distcp` file.
Both are taken apart with an unpickler that knows the few classes that belong there and refuses all
others by name. From an archive only the place of the tensor's bytes is taken, so that any rows can
be read without the rest.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from megappo.checkpoint.convert.raw import RawFile
from megappo.errors import CheckpointError

_CHECKPOINT_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict", "defaultdict"},
    "builtins": {"dict", "list", "set", "tuple"},
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in _CHECKPOINT_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(
            f".metadata asks for {module}.{name}, which no distributed checkpoint needs; it is not "
            "loaded, as it could run any code"
        )


def load_metadata(content: bytes) -> Any:
    """The `Metadata` of a checkpoint.

    Raises:
        CheckpointError: damaged, or it names a class that does not belong there.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f".metadata is damaged: {error!r}; copy it again") from error
    if type(metadata).__name__ != "Metadata":
        raise CheckpointError(".metadata does not hold the metadata of a distributed checkpoint")
    return metadata


@dataclass(frozen=True, kw_only=True)
class Archived:
    """A tensor inside a file."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """Of the tensor's first element, in bytes from the beginning of the file."""

    @property
    def is_contiguous(self) -> bool:
        """Whether its bytes lie in order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: torch.dtype


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _rebuild(storage: _Storage, offset: int, shape: Any, stride: Any, *unused: Any) -> _Tensor:
    return _Tensor(storage, offset, tuple(shape), tuple(stride))


_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise CheckpointError(f"a tensor is stored as {module}.{name}, which is not supported")

    def persistent_load(self, reference: Any) -> _Storage:
        kind, dtype, key, *_ = reference
        assert kind == "storage", reference
        return _Storage(str(key), dtype)


def locate(file: RawFile, offset: int, length: int) -> Archived:
    """Finds the bytes of the one tensor that a `torch.save` archive inside a file holds.

    Args:
        file: Open for reading.
        offset: Of the archive.
        length: Of the archive, in bytes.

    Raises:
        CheckpointError: no such archive, or it holds something else.
    """
    try:
        with zipfile.ZipFile(_Section(file, offset, length)) as archive:
            names = {name.split("/", 1)[-1]: name for name in archive.namelist()}
            if "byteorder" in names and archive.read(names["byteorder"]) != b"little":
                raise CheckpointError(f"{file.path} is of a big-endian machine")
            tensor = _TensorUnpickler(io.BytesIO(archive.read(names["data.pkl"]))).load()
            if not isinstance(tensor, _Tensor):
                raise CheckpointError(f"{file.path} has at byte {offset} no tensor")
            record = archive.getinfo(names[f"data/{tensor.storage.key}"])
    except (zipfile.BadZipFile, KeyError, pickle.UnpicklingError, EOFError, OSError) as error:
        raise CheckpointError(
            f"{file.path} holds no readable tensor at byte {offset} ({error!r}): it is cut off or "
            "damaged; copy it again"
        ) from error
    if record.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{file.path} is compressed, which is not supported")
    header = offset + record.header_offset
    name_length, extra_length = struct.unpack("<HH", file.read_bytes(header + 26, 4))
    first = header + 30 + name_length + extra_length
    dtype = tensor.storage.dtype
    return Archived(
        shape=tensor.shape,
        stride=tensor.stride,
        dtype=dtype,
        offset=first + tensor.offset * dtype.itemsize,
    )


class _Section(io.RawIOBase):
    """Part of a file as a file of its own."""

    def __init__(self, file: RawFile, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), max(self._length - self._at, 0))
        content = self._file.read_bytes(self._offset + self._at, size)
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)
