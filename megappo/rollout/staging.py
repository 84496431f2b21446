"""Shared memory through which weights reach the engine, and how tensors are packed into it.

There are two slots, used in turn: one is filled while the engine's processes load the other. In
host memory they stay for the next push, because touching new pages costs several times the copy
itself. A tensor is looked at for NaN while the piece just copied is still in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_SLOTS = 2
_ALIGNMENT = 16
"""Bytes; a tensor of any dtype may start at a multiple."""
_PIECE_BYTES = 1 << 20
"""Copied, then summed: small enough for the cache of one core, large enough for few calls."""


@dataclass(kw_only=True)
class Slot:
    """Memory that this process fills and the engine's processes read."""

    number: int
    buffer: Tensor | None = None
    """[bytes] uint8; None before the first push."""
    mapped: bool = False
    """Whether the engine's processes keep this buffer mapped, and need not be sent it again."""

    def at_least(self, num_bytes: int, *, device: torch.device) -> Tensor:
        """The buffer, if it suffices, else a larger one. [>= num_bytes] uint8."""
        buffer = self.buffer
        if buffer is None or buffer.nbytes < num_bytes or buffer.device != device:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            if device.type == "cuda":
                from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

                # Names devices by UUID: the engine's processes may number them differently.
                monkey_patch_torch_reductions()
            else:
                buffer.share_memory_()
            self.buffer, self.mapped = buffer, False
        return buffer


class Staging:
    """The slots of one engine; no larger than its two largest buckets."""

    def __init__(self) -> None:
        """Holds nothing until the first push."""
        self._slots = [Slot(number=number) for number in range(NUM_SLOTS)]

    def slot(self, bucket: int) -> Slot:
        """The slot of a push's n-th bucket; it is free once bucket n - 2 is loaded."""
        return self._slots[bucket % NUM_SLOTS]

    def end_push(self) -> None:
        """Frees device memory, which the trainer needs; keeps host memory."""
        for slot in self._slots:
            if slot.buffer is not None and slot.buffer.is_cuda:
                slot.buffer, slot.mapped = None, False


def padded(num_bytes: int) -> int:
    """The bytes that a tensor takes up in a buffer."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def pack(bucket: Sequence[tuple[str, Tensor]], buffer: Tensor) -> list[tuple[int, int]]:
    """Copies tensors into a buffer, one behind the other.

    Args:
        bucket: names and tensors.
        buffer: [bytes] uint8, large enough.

    Returns:
        Where each tensor starts and ends, bytes.

    Raises:
        ValueError: an element is NaN or infinite; with the tensor's name.
    """
    spans: list[tuple[int, int]] = []
    sums: list[Tensor] = []
    start = 0
    for _, tensor in bucket:
        end = start + tensor.nbytes
        sums += _copy(tensor, buffer[start:end].view(tensor.dtype))
        spans.append((start, end))
        start += padded(tensor.nbytes)
    require_finite(bucket, sums)
    return spans


def require_finite(bucket: Sequence[tuple[str, Tensor]], sums: Sequence[Tensor]) -> None:
    """Raises ValueError with the first tensor of which an element is NaN or infinite.

    Args:
        bucket: names and tensors.
        sums: that together add up each element once: a sum reads once and writes nothing, and
            only one that is not finite needs the second look at the tensors.
    """
    if not torch.stack([total.float() for total in sums]).isfinite().all():
        for name, tensor in bucket:
            _require_finite(name, tensor)


def _copy(tensor: Tensor, target: Tensor) -> list[Tensor]:
    """Copies a tensor into flat memory; returns the sums of its pieces."""
    if not tensor.is_contiguous():
        target.view(tensor.shape).copy_(tensor)
        return [target.sum()]
    if tensor.is_cuda or tensor.nbytes <= _PIECE_BYTES:
        return [target.copy_(tensor.view(-1)).sum()]
    size = _PIECE_BYTES // tensor.itemsize
    pieces = zip(target.split(size), tensor.view(-1).split(size), strict=True)
    return [into.copy_(piece).sum() for into, piece in pieces]


def _require_finite(name: str, tensor: Tensor) -> None:
    """Raises ValueError if an element is NaN or infinite."""
    count = int((~tensor.isfinite()).sum())
    if count:
        raise ValueError(
            f"weight {name!r} has {count} of {tensor.numel()} elements that are NaN or infinite, "
            "and was not sent: training has diverged; lower the learning rate, or resume before "
            "this step"
        )
