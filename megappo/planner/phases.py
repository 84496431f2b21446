"""Device memory of a rank in each phase of a step, and what of it is what.

A phase holds what always stays on the device (`*.memory.*_offload` off), what is fetched for it,
and what it makes while it runs. The engine holds its share (`rollout.gpu_memory_utilization`) in
all phases, or with `rollout.sleep` while it generates, until the reward model has scored, and while
it takes weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megappo.models.spec import ModelSpec
from megappo.planner.activations import layer_bytes, logit_bytes
from megappo.planner.constants import (
    DEVICE_RESERVE_BYTES,
    DTYPE_BYTES,
    ENGINE_RESERVE_BYTES,
    FRAGMENTATION,
    LOG_PROB_TEMPORARIES,
    LOG_PROB_TEMPORARY_BYTES,
    Gpu,
)
from megappo.planner.job import HEADS, Job
from megappo.planner.parameters import model_elements

PHASES = (
    "generate", "score", "log_probs", "ref", "values", "update_critic", "update_actor", "sync"
)  # fmt: skip
_RUNS = {
    "score": "reward_model", "log_probs": "actor", "ref": "reference", "values": "critic",
    "update_critic": "critic", "update_actor": "actor", "sync": "actor",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What generates, on one device."""

    weights: float
    """bytes; 0 where the trained weights themselves generate, or servers of others"""
    cache: float
    """bytes"""
    cache_tokens: int
    """that the caches of one engine hold together"""
    share: float
    """bytes that the engine takes of the device, weights and cache included"""
    problem: str = ""
    """why it cannot run"""


def cache_token_bytes(spec: ModelSpec, *, tp: int, dtype: str) -> float:
    """Keys and values of one token on one device of an engine."""
    if spec.latent is not None:  # one small vector and the rotated key, on every device
        width = spec.latent.key_value_rank + spec.latent.rotary_dim
    else:
        width = 2 * max(1, spec.num_kv_heads // tp) * spec.head_dim
    return float(spec.num_layers * width * DTYPE_BYTES[dtype])


def engine(job: Job, gpu: Gpu) -> Engine:
    """The engine of a rank."""
    rollout, spec, dtype = job.config.rollout, job.specs["actor"], job.config.model.dtype
    if rollout.url:
        return Engine(weights=0.0, cache=0.0, cache_tokens=0, share=0.0)
    if rollout.engine == "megatron":
        each = cache_token_bytes(spec, tp=job.layout.tp, dtype=dtype)
        tokens = min(rollout.max_running_requests, engine_requests(job)) * job.context_length
        return Engine(weights=0.0, cache=tokens * each, cache_tokens=tokens, share=tokens * each)
    weights = float(model_elements(spec, tp=rollout.tp) * DTYPE_BYTES[dtype])
    share = rollout.gpu_memory_utilization * gpu.memory_bytes
    cache = max(0.0, share - weights)
    tokens = int(cache / cache_token_bytes(spec, tp=rollout.tp, dtype=dtype))
    problem = ""
    if tokens < job.context_length:
        problem = (
            f"the engine's share of {share / 1e9:.1f} GB (rollout.gpu_memory_utilization "
            f"{rollout.gpu_memory_utilization:g}) has {weights / 1e9:.1f} GB of weights at "
            f"rollout.tp {rollout.tp} and a cache of {tokens} tokens, and one sample takes "
            f"{job.context_length}: raise rollout.tp or rollout.gpu_memory_utilization"
        )
    return Engine(
        weights=weights,
        cache=cache,
        cache_tokens=tokens,
        share=share + ENGINE_RESERVE_BYTES,
        problem=problem,
    )


def engine_tp(job: Job) -> int:
    """Devices of one engine; the trained weights generate in the trainer's own TP groups."""
    rollout = job.config.rollout
    return rollout.tp if rollout.engine == "sglang" else job.layout.tp


def engine_requests(job: Job) -> int:
    """Samples that an engine generates in a step."""
    return -(-job.generated * engine_tp(job) // job.world_size)


def phase_bytes(job: Job, gpu: Gpu, rank: int) -> dict[str, dict[str, float]]:
    """For each phase the parts that a device of pipeline stage `rank` holds, bytes."""
    of_engine = engine(job, gpu)
    return {
        phase: _phase(job, phase, rank, of_engine)
        for phase in PHASES
        if _RUNS.get(phase, "actor") in job.specs
    }


def _phase(job: Job, phase: str, rank: int, of_engine: Engine) -> dict[str, float]:
    parts: dict[str, float] = {}
    runs = _RUNS.get(phase)
    whole = phase.startswith("update")
    for role in job.specs:
        for part, size in _present(job, role, rank, runs=role == runs, whole=whole).items():
            parts[f"{role} {part}"] = size
    if runs is not None and phase != "sync":
        parts |= _work(job, runs, rank, whole=whole)
    if phase == "sync" and not job.config.rollout.url:
        parts["buckets"] = 2.0 * job.config.rollout.sync_bucket_bytes
    trainer = sum(parts.values())
    parts["fragmentation"] = FRAGMENTATION * trainer
    parts["engine"] = _engine_bytes(job, phase, of_engine)
    parts["reserve"] = float(DEVICE_RESERVE_BYTES)
    return {name: size for name, size in parts.items() if size}


def _present(job: Job, role: str, rank: int, *, runs: bool, whole: bool) -> Mapping[str, float]:
    """What of a model is on the device; `whole` with gradients and optimizer state, if it runs."""
    static, keeps = job.static(role, rank), job.keeps(role)
    return {
        "weights": static.weights if runs or not keeps.param_offload else 0.0,
        "gradients": static.grads if (runs and whole) or not keeps.grad_offload else 0.0,
        "optimizer": static.optimizer if (runs and whole) or not keeps.optimizer_offload else 0.0,
        "gathered weights": static.gathered if runs else 0.0,
        "fp8 copies": job.fp8_copies(role, rank) if runs else 0.0,
    }


def _work(job: Job, role: str, rank: int, *, whole: bool) -> dict[str, float]:
    """Activations, logits and working memory of a pass."""
    spec, layout, kernels = job.specs[role], job.layouts[role], job.kernels
    micro, stage = job.micro(role), job.stage(role, rank)
    has_logits = stage[-1].has_head and HEADS[role] == "lm"
    one_layer = max(
        layer_bytes(spec, layout, kernels, experts=experts)
        for experts, count in (
            (False, sum(c.dense_layers for c in stage)),
            (True, sum(c.moe_layers for c in stage)),
        )
        if count
    )
    made = {"working memory": micro.tokens * one_layer}
    logits = micro.tokens * logit_bytes(spec, layout, kernels) if has_logits else 0.0
    if has_logits:
        made["logits"] = logits
        made["float32 log-probs"] = LOG_PROB_TEMPORARIES * min(
            float(LOG_PROB_TEMPORARY_BYTES), 2 * logits
        )
    if whole:
        made["activations"] = max(0.0, job.activations(role, rank) - logits)
    return made


def _engine_bytes(job: Job, phase: str, of_engine: Engine) -> float:
    rollout = job.config.rollout
    if phase == "generate" or not of_engine.share:
        return of_engine.share
    if rollout.engine == "megatron":  # its cache lives while it generates
        return 0.0
    if not rollout.sleep:
        return of_engine.share
    # An engine that wakes takes weights, the push, then its cache: all of it fits with the actor's.
    # It falls asleep once everything is scored.
    return of_engine.share if phase in ("sync", "score") else float(ENGINE_RESERVE_BYTES)
