"""Moves a model's memory between device and host, so that generation and training share a device.

An `Offloader` knows three parts of one model on this rank, and moves each as a whole:

    params     weights and module buffers; Megatron's contiguous parameter buffers
    grads      Megatron's gradient buffers: freed, not copied, and zero when they come back
    optimizer  float32 main parameters, first and second moments

Tensors stay the objects they are: only the storage below them shrinks to zero bytes and grows again
with the same content, so that views into a buffer, optimizer state and autograd hooks stay valid. A
storage that two parts share (float32 main parameters are views into the parameter buffer) belongs
to the first part of the order above and is moved once.

How a trainer uses it:

    actor.memory.offload()                      # before generation: all parts chosen in the config
    with actor.memory.on_device("params"):      # log-probs, weight push
        ...
    with actor.memory.on_device():              # update, checkpoint: everything
        ...

Parts that were on the device before `on_device` stay there after it. Every call may be repeated. A
pending parameter all-gather must be over before `offload`: call `Trainable.settle`. A forward pass
of a model whose weights are away raises `OffloadedError`, and so does what calls `require`.

On CUDA the copies lie in pinned memory, which is kept for the next time. On the CPU the same steps
run, storages really empty and fill, but both copies would be host memory: nothing is saved. Left
out: moving single layers, and Megatron's FSDP, which frees what it does not need by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Part = Literal["params", "grads", "optimizer"]
PARTS: tuple[Part, ...] = ("params", "grads", "optimizer")

_PIECE_BYTES = 2**28
"""Host memory is taken in pieces: torch rounds a pinned block up to a power of two."""


def chosen_parts(*, params: bool, grads: bool, optimizer: bool) -> tuple[Part, ...]:
    """The parts that a config's three switches name."""
    wanted = {"params": params, "grads": grads, "optimizer": optimizer}
    return tuple(part for part in PARTS if wanted[part])


def on_device(memory: Offloader | None, *parts: Part) -> AbstractContextManager[None]:
    """`memory.on_device(*parts)`; nothing for a model that manages its memory itself."""
    return nullcontext() if memory is None else memory.on_device(*parts)


class OffloadedError(RuntimeError):
    """A model was used while the part that the use needs lies in host memory."""


@dataclass(frozen=True, kw_only=True)
class _Moved:
    """A storage that was emptied, and its content; grads have none."""

    storage: torch.UntypedStorage
    num_bytes: int
    copies: Sequence[Tensor]


class Offloader:
    """The memory of one model on this rank. Nothing here communicates.

    Args:
        name: of the model, for messages.
        modules: bare model chunks.
        buffers: Megatron's parameter and gradient buffers; none for a frozen model.
        optimizer: Megatron's; None for a frozen model.
        parts: what `offload()` moves; the others always stay on the device.
    """

    def __init__(
        self,
        name: str,
        modules: Sequence[torch.nn.Module],
        *,
        buffers: Sequence[Any] = (),
        optimizer: Any = None,
        parts: Sequence[Part] = PARTS,
    ) -> None:
        unknown = set(parts) - set(PARTS)
        assert not unknown, f"unknown parts {sorted(unknown)}; known: {', '.join(PARTS)}"
        self.name = name
        self.parts = tuple(part for part in PARTS if part in parts)
        self.moved_bytes = 0
        """Bytes copied so far, both ways together; freed gradients are not copied."""
        self._modules = list(modules)
        self._buffers = list(buffers)
        self._optimizer = optimizer
        self._device = next(p.device for m in modules for p in m.parameters())
        self._away: dict[Part, list[_Moved]] = {}
        self._host = {part: _HostSpace(pinned=self._device.type == "cuda") for part in PARTS}
        for module in self._modules:
            module.register_forward_pre_hook(self._before_forward, prepend=True)

    @property
    def offloaded_bytes(self) -> int:
        """Device bytes that are free now because of offloading, gradients included."""
        return sum(moved.num_bytes for part in self._away.values() for moved in part)

    def is_away(self, part: Part) -> bool:
        """Whether the part is in host memory."""
        return part in self._away

    def part_bytes(self, part: Part) -> int:
        """Bytes of a part, wherever it is; what another part owns does not count."""
        if part in self._away:
            return sum(moved.num_bytes for moved in self._away[part])
        return sum(storage.nbytes() for storage in self._storages(part))

    def contents(self, *parts: Part) -> dict[int, list[Tensor]]:
        """All bytes of the named parts where they are now, on the device or on the host.

        Returns:
            For each storage (by the address of torch's object, which offloading leaves alone)
            uint8 tensors that follow one another; writing to them writes to the model.
        """
        found: dict[int, list[Tensor]] = {}
        for part in parts:
            if part in self._away:
                found |= {moved.storage._cdata: list(moved.copies) for moved in self._away[part]}
            else:
                found |= {s._cdata: [_content(s)] for s in self._storages(part)}
        return found

    def offload(self, *parts: Part) -> None:
        """Moves parts to the host: of those chosen at the start the named ones, or all."""
        wanted = [p for p in self.parts if p not in self._away and (not parts or p in parts)]
        if not wanted:
            return
        self._wait()
        # Which part owns a shared storage shows only while all of them are there.
        found = {part: self._storages(part) for part in wanted}
        for part, storages in found.items():
            self._away[part] = self._copy_out(part, storages)
        self._wait()
        for part in wanted:
            for moved in self._away[part]:
                moved.storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def load(self, *parts: Part) -> None:
        """Brings the named parts back, or all; gradients come back as zeros."""
        wanted = [p for p in PARTS if p in self._away and (not parts or p in parts)]
        for part in wanted:
            for moved in self._away[part]:
                self._copy_in(moved)
        if wanted:
            self._wait()
        for part in wanted:
            del self._away[part]
            self._host[part].release()

    @contextmanager
    def on_device(self, *parts: Part) -> Iterator[None]:
        """The named parts, or all, on the device within the block; then where they were before."""
        away = [part for part in self._away if not parts or part in parts]
        self.load(*parts)
        try:
            yield
        finally:
            if away:
                self.offload(*away)

    def require(self, *parts: Part) -> None:
        """Raises where one of the parts is away.

        Raises:
            OffloadedError: with the call that was missing.
        """
        away = [part for part in parts if part in self._away]
        if away:
            names = ", ".join(f'"{part}"' for part in away)
            raise OffloadedError(
                f"the {self.name}'s {' and '.join(away)} lie in host memory: load({names}), or "
                f"on_device({names}), must come before this use"
            )

    def _before_forward(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        self.require("params")

    def _tensors(self, part: Part) -> Iterator[Tensor]:
        if part == "params":
            for module in self._modules:
                yield from module.parameters()
                yield from module.buffers()
            yield from (b.param_data for b in self._buffers if b.param_data is not None)
        elif part == "grads":
            yield from (b.grad_data for b in self._buffers)
        else:
            yield from optimizer_tensors(self._optimizer)

    def _storages(self, part: Part) -> list[torch.UntypedStorage]:
        """Non-empty storages on the device that no earlier part has, each once."""
        earlier = PARTS[: PARTS.index(part)]
        owned = {_address(t) for other in earlier for t in self._tensors(other)}
        # An earlier part that is away has left no address: its storages are empty and fall out.
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in self._tensors(part):
            storage = tensor.untyped_storage()
            if tensor.device != self._device or not storage.nbytes():
                continue
            if _address(tensor) not in owned:
                found.setdefault(_address(tensor), storage)
        return list(found.values())

    def _copy_out(self, part: Part, storages: Sequence[torch.UntypedStorage]) -> list[_Moved]:
        sizes = [storage.nbytes() for storage in storages]
        if part == "grads":
            return [
                _Moved(storage=storage, num_bytes=size, copies=())
                for storage, size in zip(storages, sizes, strict=True)
            ]
        moved = []
        slots = self._host[part].take(sizes)
        for storage, size, slot in zip(storages, sizes, slots, strict=True):
            content = _content(storage).split([piece.numel() for piece in slot])
            for piece, source in zip(slot, content, strict=True):
                piece.copy_(source, non_blocking=True)
            moved.append(_Moved(storage=storage, num_bytes=size, copies=slot))
            self.moved_bytes += size
        return moved

    def _copy_in(self, moved: _Moved) -> None:
        moved.storage.resize_(moved.num_bytes)
        content = _content(moved.storage)
        if not moved.copies:
            content.zero_()
            return
        targets = content.split([piece.numel() for piece in moved.copies])
        for target, piece in zip(targets, moved.copies, strict=True):
            target.copy_(piece, non_blocking=True)
        self.moved_bytes += moved.num_bytes

    def _wait(self) -> None:
        """Until copies and whatever else uses the memory, on any stream, are done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _HostSpace:
    """Host memory of one part, filled from the start each time."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._pieces: list[Tensor] = []

    def take(self, sizes: Sequence[int]) -> list[list[Tensor]]:
        """For each size, uint8 tensors that have so many bytes together."""
        self._grow(sum(sizes) - sum(piece.numel() for piece in self._pieces))
        slots: list[list[Tensor]] = []
        number = start = 0
        for size in sizes:
            slot = []
            while size:
                piece = self._pieces[number][start : start + size]
                slot.append(piece)
                size -= piece.numel()
                start += piece.numel()
                if start == self._pieces[number].numel():
                    number, start = number + 1, 0
            slots.append(slot)
        return slots

    def _grow(self, num_bytes: int) -> None:
        while num_bytes > 0:
            size = min(num_bytes, _PIECE_BYTES)
            self._pieces.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned))
            num_bytes -= size

    def release(self) -> None:
        """Gives memory back that costs nothing to get again; pinned memory is kept."""
        if not self._pinned:
            self._pieces.clear()


def optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Parameters that a Megatron optimizer updates on this rank, and their state.

    Float32 models: the parameters are views into the model's. A mixture of experts has an optimizer
    of its own for the experts, chained to the other.
    """
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers within Megatron's; none for None, or where no parameter is trained."""
    if optimizer is None:
        return []
    from megatron.core.optimizer import ChainedOptimizer

    parts: Iterable[Any] = (
        optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    )
    return [part.optimizer for part in parts if not part.is_stub_optimizer]


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _content(storage: torch.UntypedStorage) -> Tensor:
    """All bytes of a storage, as a uint8 view."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
