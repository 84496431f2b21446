"""Bytes that a rank sends, by the group that they travel in.

Legend: s positions of a forward pass on this rank (S / CP), h hidden size, D bytes of the dtype, n
ranks of the group in question; ring collectives: an all-gather or reduce-scatter of b bytes sends
b (n - 1) / n, an all-reduce twice that.

    TP    forward: an all-reduce of s h D behind attention and behind an MLP, or its two halves
          under sequence parallelism, which gathers the inputs once more in the backward pass
          (Korthikanti et al. 2022, section 4.2)
    CP    keys and values go round a ring, in the backward pass with their gradients
    EP    each token to its experts and back (all-to-all), forward and backward
    PP    hidden states forward, their gradients back
    DP    an optimizer step: float32 gradients reduce-scattered, weights all-gathered
    sync  a push: whole weights are gathered in every replica

Left out: control messages, metrics, the tied embedding's all-reduce, samples (kilobytes).
"""

from __future__ import annotations

from dataclasses import dataclass

from megappo.models.spec import ModelSpec
from megappo.planner.constants import DTYPE_BYTES, GRAD_BYTES
from megappo.planner.job import FROZEN, HEADS, Job
from megappo.planner.layout import Layout
from megappo.planner.memory import stage_elements
from megappo.planner.parameters import Stage, model_elements

GROUPS = ("tp", "cp", "ep", "pp", "dp", "sync")


def ring(num_bytes: float, ranks: int) -> float:
    """Bytes sent in an all-gather or reduce-scatter whose whole tensor has `num_bytes`."""
    return num_bytes * (ranks - 1) / ranks


@dataclass(frozen=True, kw_only=True)
class PassTraffic:
    """What one forward pass of a stage sends, and its backward pass, bytes by group."""

    forward: dict[str, float]
    backward: dict[str, float]


def pass_traffic(
    spec: ModelSpec, layout: Layout, stage: Stage, *, tokens: float, dtype: str
) -> PassTraffic:
    """One micro-batch on one stage.

    Args:
        spec: of the model.
        layout: of the ranks.
        stage: what the rank holds.
        tokens: positions on this rank.
        dtype: of the model.
    """
    size = DTYPE_BYTES[dtype]
    hidden = tokens * spec.hidden_size * size
    dense = sum(chunk.dense_layers for chunk in stage)
    moe = sum(chunk.moe_layers for chunk in stage)
    # Attention and MLP; routed experts take tokens as they are split, shared ones do not.
    blocks = 2 * dense + moe * (1 + (spec.shared_ffn_hidden_size > 0))
    tp = 2 * ring(hidden, layout.tp) * blocks
    rows = moe * spec.experts_per_token * hidden / layout.token_split
    tp += 2 * ring(rows * layout.etp, layout.etp)
    ep = 2 * ring(rows, layout.ep)
    pairs = (dense + moe) * _key_value_width(spec, layout) * tokens * size
    cp = (layout.cp - 1) * pairs
    sends = layout.vp if layout.pp > 1 else 0
    pp = sends * hidden / layout.token_split
    forward = {"tp": tp, "cp": cp, "ep": ep, "pp": pp}
    regather = ring(hidden, layout.tp) * blocks if layout.sequence_parallel else 0.0
    return PassTraffic(
        forward=forward, backward={"tp": tp + regather, "cp": 2 * cp, "ep": ep, "pp": pp}
    )


def _key_value_width(spec: ModelSpec, layout: Layout) -> float:
    """Numbers of a token's keys and values in one layer on one rank."""
    if spec.latent is not None:
        return spec.num_heads / layout.tp * (spec.head_dim + spec.latent.value_dim)
    return 2 * spec.num_kv_heads / layout.tp * spec.head_dim


@dataclass(frozen=True, kw_only=True)
class StepTraffic:
    """An optimizer step's exchange over DP, bytes sent."""

    gradients: float
    weights: float


def update_traffic(job: Job, role: str, rank: int) -> StepTraffic:
    """Reduce-scatter and all-gather of one optimizer step; FSDP's are those of every pass."""
    spec, layout = job.specs[role], job.layouts[role]
    size = DTYPE_BYTES[job.config.model.dtype]
    gradients = weights = 0.0
    for found in stage_elements(spec, layout, job.stage(role, rank), HEADS[role]):
        for count, ranks in (
            (found.aligned_dense, layout.grad_ranks),
            (found.aligned_experts, layout.expert_grad_ranks),
        ):
            gradients += ring(count * GRAD_BYTES, ranks)
            weights += ring(count * size, ranks)
    if layout.fsdp:  # gathered for each forward and each backward pass
        passes = job.micro(role).num_passes
        return StepTraffic(gradients=gradients * passes, weights=2 * weights * passes)
    return StepTraffic(gradients=gradients, weights=weights)


def push_bytes(job: Job, rank: int) -> float:
    """What a rank receives while whole weights are gathered for the engines."""
    size = DTYPE_BYTES[job.config.model.dtype]
    whole = model_elements(job.specs["actor"]) * size
    layout = job.layouts["actor"]
    found = stage_elements(job.specs["actor"], layout, job.stage("actor", rank), "lm")
    own = sum(e.total for e in found) * size / (layout.grad_ranks if layout.fsdp else 1)
    return max(0.0, whole - own)


def step_traffic(job: Job, rank: int) -> dict[str, float]:
    """All of a step on one rank, bytes sent by group."""
    total = dict.fromkeys(GROUPS, 0.0)
    for role in job.specs:
        micro = job.micro(role)
        one = pass_traffic(
            job.specs[role],
            job.layouts[role],
            job.stage(role, rank),
            tokens=micro.mean_tokens,
            dtype=job.config.model.dtype,
        )
        updates = 0 if role in FROZEN else job.num_updates
        again = updates if job.keeps(role).recompute == "full" else 0
        forward = micro.num_passes * (job.num_forwards(role) + updates + again)
        backward = micro.num_passes * updates
        for group, size in one.forward.items():
            total[group] += forward * size + backward * one.backward[group]
        if updates:
            exchange = update_traffic(job, role, rank)
            total["dp"] += updates * (exchange.gradients + exchange.weights)
    total["sync"] = push_bytes(job, rank)
    return {group: size for group, size in total.items() if size}
