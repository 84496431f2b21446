"""Reads bytes of a file straight into tensors.

Files are not mapped: pages of a map count as memory of the process, so that its peak would grow
with the model. `numpy` and `safetensors` have no such read, so it stands here.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from megappo.errors import CheckpointError

BLOCK_BYTES = 64 * 2**20
"""What is held at once of a tensor that can be handled by rows."""
_MAX_READ_BYTES = 2**30
"""Linux gives at most 2^31 - 4096 bytes a call."""


class RawFile:
    """A file that is open for reading at any place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        self.num_bytes = os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)

    def __enter__(self) -> RawFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def read_bytes(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on, fewer at the file's end."""
        return os.pread(self._descriptor, size, offset)

    def read_into(self, out: Tensor, offset: int) -> None:
        """Fills a contiguous tensor.

        Args:
            out: Contiguous, on the CPU.
            offset: Of its first byte in the file.

        Raises:
            CheckpointError: the file ends before.
        """
        if not out.numel():
            return
        view = memoryview(byte_view(out))
        done = 0
        while done < len(view):
            part = view[done : done + _MAX_READ_BYTES]
            count = os.preadv(self._descriptor, [part], offset + done)
            if count == 0:
                raise CheckpointError(
                    f"{self.path} ends at byte {self.num_bytes}, but a tensor needs bytes up to "
                    f"{offset + len(view)}: the file is cut off; copy it again"
                )
            done += count

    def read_rows(
        self,
        offset: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        """Rows from `start` to `stop` of a contiguous tensor of `shape` that begins at `offset`."""
        if not shape:
            out = torch.empty((), dtype=dtype)
            self.read_into(out, offset)
            return out
        start, stop, _ = slice(start, stop).indices(shape[0])
        out = torch.empty((max(stop - start, 0), *shape[1:]), dtype=dtype)
        row_bytes = num_bytes(shape[1:], dtype)
        self.read_into(out, offset + start * row_bytes)
        return out


def byte_view(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    assert tensor.is_contiguous(), tensor.shape
    view: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return view


def num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Size of a tensor."""
    return math.prod(shape) * int(dtype.itemsize)
