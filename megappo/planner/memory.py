"""Bytes of one model on one rank: weights, gradients, optimizer state.

Megatron's distributed optimizer (Rajbhandari et al. 2020, arXiv 1910.02054, stage 1): weights and
float32 gradients are whole in contiguous buffers on each rank; two float32 moments, and for
bfloat16 weights their float32 copy, are divided by DP x CP (experts: by the ranks that hold the
same ones). With n elements in a buffer (padded), D bytes of the dtype and g ranks:

    weights n D    gradients 4 n    optimizer state (8 + 4 [D < 4]) n / g

FSDP divides all three by g and gathers a layer or two at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from megappo.models.spec import ModelSpec
from megappo.planner.constants import (
    BUFFER_ALIGNMENT,
    DTYPE_BYTES,
    FSDP_GATHERED_LAYERS,
    GRAD_BYTES,
    MAIN_PARAM_BYTES,
    MOMENT_BYTES,
)
from megappo.planner.flops import Head
from megappo.planner.layout import Layout
from megappo.planner.parameters import Elements, Stage, chunk_elements, layer_elements, stages


@dataclass(frozen=True, kw_only=True)
class Static:
    """What a model holds between steps on one rank, bytes."""

    weights: float
    grads: float = 0.0
    optimizer: float = 0.0
    gathered: float = 0.0
    """Weights that FSDP makes whole while the model runs."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.grads + self.optimizer + self.gathered


def layout_stages(spec: ModelSpec, layout: Layout) -> tuple[Stage, ...]:
    """What each pipeline rank of a layout holds."""
    return stages(spec, pp=layout.pp, vp=layout.vp, pipeline_layers=layout.pipeline_layers)


def stage_elements(spec: ModelSpec, layout: Layout, stage: Stage, head: Head) -> list[Elements]:
    """Parameters of each chunk of a stage; each has buffers of its own."""
    return [
        chunk_elements(spec, chunk, head=head, tp=layout.tp, ep=layout.ep, etp=layout.etp)
        for chunk in stage
    ]


@lru_cache(maxsize=8192)
def trained(spec: ModelSpec, layout: Layout, stage: Stage, *, dtype: str, head: Head) -> Static:
    """A model under the distributed optimizer, or FSDP."""
    size = DTYPE_BYTES[dtype]
    state = MOMENT_BYTES + (MAIN_PARAM_BYTES if size < MAIN_PARAM_BYTES else 0)
    buffers: list[tuple[int, int]] = []
    for found in stage_elements(spec, layout, stage, head):
        buffers.append((_padded(found.aligned_dense, layout.grad_ranks), layout.grad_ranks))
        if found.experts:
            ranks = layout.expert_grad_ranks
            buffers.append((_padded(found.aligned_experts, ranks), ranks))
    optimizer = sum(count * state / ranks for count, ranks in buffers)
    if layout.fsdp:
        shard = sum(count / ranks for count, ranks in buffers)
        experts = bool(spec.num_experts)
        layer = layer_elements(
            spec, experts=experts, tp=layout.tp, ep=layout.ep, etp=layout.etp
        ).total
        return Static(
            weights=shard * size,
            grads=shard * GRAD_BYTES,
            optimizer=optimizer,
            gathered=FSDP_GATHERED_LAYERS * layer * size,
        )
    elements = sum(count for count, _ in buffers)
    return Static(weights=elements * size, grads=elements * GRAD_BYTES, optimizer=optimizer)


@lru_cache(maxsize=8192)
def frozen(spec: ModelSpec, layout: Layout, stage: Stage, *, dtype: str, head: Head) -> Static:
    """Reference and reward model: weights alone, whole under FSDP too."""
    found = stage_elements(spec, layout, stage, head)
    return Static(weights=float(sum(e.total for e in found) * DTYPE_BYTES[dtype]))


def _padded(elements: int, ranks: int) -> int:
    multiple = math.lcm(ranks, BUFFER_ALIGNMENT)
    return -(-elements // multiple) * multiple
