"""A copy of the training state in this rank's host memory, to go back to without a disk.

Weights, float32 main weights and moments are copied storage by storage, so that everything that is
a view of them comes back too. Left out: gradients, which a step makes anew, frozen weights, which
none changes, and models under `parallel.fsdp`, whose shards Megatron moves by itself: they go back
to a checkpoint on disk.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megappo.checkpoint import streams
from megappo.distributed.grad_sync import Trainable
from megappo.distributed.host_memory import available_bytes
from megappo.distributed.offload import Offloader, Part, inner_optimizers
from megappo.distributed.parallel import ParallelContext, any_rank

PARTS: tuple[Part, ...] = ("params", "optimizer")

MEMORY_SHARE = 0.5
"""Most of the host memory that is free which the copies of a node's ranks may take."""


@dataclass(kw_only=True)
class Snapshot:
    """The newest copy, or none yet."""

    models: Mapping[str, Trainable]
    state: dict[str, Any] | None = None
    """What else was given to `take`; None before the first."""
    _copies: dict[str, _ModelCopy] = field(default_factory=dict)
    _streams: dict[str, Any] = field(default_factory=dict)

    def take(self, state: Mapping[str, Any]) -> None:
        """Replaces the copy by what models, optimizers and random streams are now.

        Collective over DP where parameters are gathered late (`Trainable.settle`).

        Args:
            state: small values that belong to it, copied.
        """
        for name, model in self.models.items():
            self._copies.setdefault(name, _ModelCopy(model)).take()
        self._streams = copy.deepcopy(streams.capture())
        self.state = copy.deepcopy(dict(state))

    def restore(self) -> dict[str, Any]:
        """Brings the copy back, any number of times; returns the small values. No communication."""
        assert self.state is not None, "nothing was copied yet"
        for of_model in self._copies.values():
            of_model.restore()
        streams.restore(copy.deepcopy(self._streams))
        return copy.deepcopy(self.state)


def has_room(
    models: Mapping[str, Trainable], context: ParallelContext, *, local_world_size: int
) -> bool:
    """Whether every rank can hold a copy. Collective over the world."""
    if any(model.memory is None for model in models.values()):
        return False
    # Moments come into being with the first step: two float32 numbers a float32 main weight.
    needed = sum(_expected_bytes(model) for model in models.values())
    free = available_bytes()
    return not any_rank(needed * local_world_size > MEMORY_SHARE * free, context)


def _expected_bytes(model: Trainable) -> int:
    mains: int = sum(
        parameter.numel()
        for optimizer in inner_optimizers(model.optimizer)
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    contents = trained_contents(model, "params").values()
    weights: int = sum(piece.numel() for pieces in contents for piece in pieces)
    return weights + 12 * mains


def trained_contents(model: Trainable, *parts: Part) -> dict[int, list[torch.Tensor]]:
    """`Offloader.contents` without the storages that hold frozen weights alone."""
    parameters = [p for chunk in model.chunks for p in chunk.module.parameters()]
    frozen = {p.untyped_storage()._cdata for p in parameters if not p.requires_grad}
    trained = {p.untyped_storage()._cdata for p in parameters if p.requires_grad}
    return {
        key: pieces
        for key, pieces in _memory(model).contents(*parts).items()
        if key not in frozen - trained
    }


def _memory(model: Trainable) -> Offloader:
    assert model.memory is not None, "fully sharded models are not copied"
    return model.memory


class _ModelCopy:
    """One model on this rank. What is offloaded is copied from the host, and written back there."""

    def __init__(self, model: Trainable) -> None:
        self._model = model
        self._bytes: dict[int, torch.Tensor] = {}
        self._optimizers: list[_OptimizerCopy] = []
        self._scheduler_steps = 0

    def take(self) -> None:
        self._model.settle()
        old, self._bytes = self._bytes, {}
        for key, pieces in trained_contents(self._model, *PARTS).items():
            size = sum(piece.numel() for piece in pieces)
            kept = old.pop(key, None)
            if kept is None or kept.numel() != size:
                kept = torch.empty(size, dtype=torch.uint8)
            for part, piece in zip(_like(kept, pieces), pieces, strict=True):
                part.copy_(piece)
            self._bytes[key] = kept
        self._optimizers = [
            _OptimizerCopy(optimizer) for optimizer in inner_optimizers(self._model.optimizer)
        ]
        self._scheduler_steps = self._model.scheduler.num_steps

    def restore(self) -> None:
        self._model.settle()
        for optimizer in self._optimizers:
            optimizer.restore()
        # Moments that came into being since are no longer in the optimizer, or not in the copy.
        pieces = trained_contents(self._model, *PARTS)
        for key, kept in self._bytes.items():
            for part, piece in zip(_like(kept, pieces[key]), pieces[key], strict=True):
                piece.copy_(part)
        self._model.scheduler.num_steps = self._scheduler_steps
        self._model.scheduler.step(0)
        self._model.limit_lr(self._model.lr_limit.value)


def _like(whole: torch.Tensor, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of consecutive bytes, as long as the pieces are."""
    return list(whole.split([piece.numel() for piece in pieces]))


class _OptimizerCopy:
    """What an optimizer keeps beside its tensors' content, which is copied by storage."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {p: _kept(p, state) for p, state in optimizer.state.items()}
        self._groups = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]

    def restore(self) -> None:
        """State that came into being since is dropped, so that the next step makes it anew."""
        self._optimizer.state.clear()
        self._optimizer.state.update({p: _kept(p, state) for p, state in self._state.items()})
        for group, kept in zip(self._optimizer.param_groups, self._groups, strict=True):
            for key in set(group) - set(kept) - {"params"}:
                del group[key]
            group.update(copy.deepcopy(kept))


def _kept(parameter: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state; what lies elsewhere than the parameter (a step count) is copied."""
    return {
        key: value
        if torch.is_tensor(value) and value.device == parameter.device and value.dim() > 0
        else copy.deepcopy(value)
        for key, value in state.items()
    }
