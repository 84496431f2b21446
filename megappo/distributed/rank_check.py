"""Whether ranks that must hold the same weights do, bit for bit, and whether weights are finite.

Ranks hold the same weights over DP and CP (experts over their own DP). Over TP they hold the same
norms, routers, biases of row-parallel layers and value heads, and with tied embeddings the first
and last stage share one matrix. Each rank sends one digest a set; only where two differ are the
tensors looked at one by one.

Left out: moments and float32 main weights, of which every rank holds its own share, and fully
sharded models, where no weight is held twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megappo.distributed.offload import optimizer_tensors
from megappo.distributed.parallel import ParallelContext, all_gather_objects
from megappo.errors import RanksDifferError

Place = tuple[str, tuple[int, ...]]
"""What is shared, and which share of it: ranks of the same place hold the same tensors."""

_ROW = 256
"""Elements whose bits are added up before their place counts."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """A tensor of this rank, and the places where other ranks have it too."""

    name: str
    tensor: Tensor
    places: Sequence[Place]


def compare_ranks(model: str, chunks: Sequence[Any], context: ParallelContext) -> int:
    """Compares all weights that ranks share; returns how many this rank has.

    Collective over the world. Weights must be on the device and settled.

    Args:
        model: `actor` or `critic`, for the message.
        chunks: Megatron's wrapper around each chunk.
        context: this rank's place.

    Raises:
        RanksDifferError: with the first tensor that differs, and the ranks.
    """
    shared = list(_shared(chunks, context))
    prints = torch.stack([fingerprint(s.tensor) for s in shared]).cpu().tolist()
    by_place: dict[Place, list[tuple[str, int]]] = {}
    for tensor, found in zip(shared, prints, strict=True):
        for place in tensor.places:
            by_place.setdefault(place, []).append((tensor.name, found))
    mine = {place: _digest(found) for place, found in by_place.items()}
    bad = _first_difference(all_gather_objects(mine, context.world_group))
    if bad is not None:
        told = all_gather_objects(dict(by_place.get(bad, [])), context.world_group)
        raise RanksDifferError(f"the {model}'s weights differ {bad[0]}: {_describe(told)}")
    return len(shared)


def fingerprint(tensor: Tensor) -> Tensor:
    """A number of a tensor's bits and their places, 0-dim int64; any one changed bit changes it.

    Sums wrap around. Elements that only swap places within 256 neighbours are not seen.
    """
    bits = tensor.detach().contiguous().reshape(-1).view(_BITS[tensor.element_size()])
    whole = bits.numel() // _ROW * _ROW
    rows = bits[:whole].view(-1, _ROW).sum(1, dtype=torch.int64)
    rest = bits[whole:].sum(dtype=torch.int64)
    weights = 2 * torch.arange(rows.numel(), device=rows.device) + 3
    return (rows * weights).sum() + rest


def non_finite(model: str, chunks: Sequence[Any], optimizer: Any, context: ParallelContext) -> str:
    """Where weights or moments are not finite, in words; empty where all are.

    Collective over the world; the same on all ranks. Each looks at the share that it updates.
    """
    checks = [_local(t).isfinite().all() for t in optimizer_tensors(optimizer) if t.numel()]
    mine = ""
    if checks and not bool(torch.stack(checks).all()):
        names = (
            name
            for chunk in chunks
            for name, parameter in chunk.module.named_parameters()
            if not _local(parameter).isfinite().all()
        )
        mine = next(names, "a moment of the optimizer")
    told = all_gather_objects(mine, context.world_group)
    found = [(rank, name) for rank, name in enumerate(told) if name]
    if not found:
        return ""
    rank, name = found[0]
    return f"the {model} is not finite: {name} (rank {rank}; {len(found)} ranks have any)"


def _local(tensor: Any) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shared(chunks: Sequence[Any], context: ParallelContext) -> Iterator[_Shared]:
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.module.named_parameters():
            yield _Shared(
                name=f"{name} (stage {context.pp_rank}, chunk {number})",
                tensor=parameter,
                places=[_of_copies(parameter, context), *_of_replicated(parameter, context)],
            )
            # Megatron's mark on both copies of a tied embedding under PP.
            if getattr(parameter, "shared_embedding", False):
                yield _Shared(
                    name="the tied embedding",
                    tensor=parameter,
                    places=[("between the first and the last stage", (context.tp_rank,))],
                )


def _of_copies(parameter: Tensor, context: ParallelContext) -> Place:
    from megatron.core import parallel_state

    if _is_expert(parameter):
        return "between data-parallel ranks", (
            context.pp_rank,
            parallel_state.get_expert_tensor_parallel_rank(),
            1 + parallel_state.get_expert_model_parallel_rank(),
        )
    return "between data-parallel ranks", (context.pp_rank, context.tp_rank, 0)


def _of_replicated(parameter: Tensor, context: ParallelContext) -> list[Place]:
    # Megatron's mark on a matrix that is split over TP; the others are whole on each rank.
    is_split = getattr(parameter, "tensor_model_parallel", False)
    if is_split or _is_expert(parameter):
        return []
    return [("between tensor-parallel ranks", (context.pp_rank,))]


def _is_expert(parameter: Tensor) -> bool:
    """Megatron's mark on weights whose gradients are not reduced over all of DP."""
    return not getattr(parameter, "allreduce", True)


def _digest(found: Sequence[tuple[str, int]]) -> str:
    return hashlib.blake2b(repr(list(found)).encode(), digest_size=16).hexdigest()


def _first_difference(told: Sequence[Mapping[Place, str]]) -> Place | None:
    """A place of which two ranks have different digests, the same one on every rank."""
    seen: dict[Place, str] = {}
    bad = {
        place
        for digests in told
        for place, digest in digests.items()
        if seen.setdefault(place, digest) != digest
    }
    return min(bad, default=None)


def _describe(told: Sequence[Mapping[str, int]]) -> str:
    """The first tensor that differs, and which ranks have which value of it."""
    having = {rank: prints for rank, prints in enumerate(told) if prints}
    first = next(iter(having.values()))
    differing = [n for n in first if any(p.get(n) != first[n] for p in having.values())]
    name = differing[0]
    groups: dict[int | None, list[int]] = {}
    for rank, prints in having.items():
        groups.setdefault(prints.get(name), []).append(rank)
    ranks = " against ".join(", ".join(map(str, group)) for group in groups.values())
    return f"{name}, ranks {ranks} ({len(differing)} of {len(first)} tensors differ)"
