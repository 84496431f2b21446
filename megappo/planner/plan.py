"""One layout planned: does it fit, what does it send, how long does a step take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megappo.config import Config
from megappo.config.layout import ParallelSection
from megappo.planner.constants import FLOPS_EFFICIENCY, Gpu
from megappo.planner.job import HEADS, Job
from megappo.planner.parameters import model_elements
from megappo.planner.phases import Engine, engine, phase_bytes
from megappo.planner.timing import Times, times
from megappo.planner.traffic import step_traffic

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """A phase on the pipeline stage that is fullest then."""

    stage: int
    parts: dict[str, float]
    """bytes"""

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Memory alone."""

    phases: dict[str, PhaseMemory]
    engine: Engine
    problems: tuple[str, ...]
    """why it does not fit; empty if it does"""

    @property
    def fullest(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: self.phases[phase].total)

    @property
    def peak(self) -> float:
        """Bytes of that phase."""
        return self.phases[self.fullest].total


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All figures of one layout."""

    job: Job
    gpu: Gpu
    fit: Fit
    times: Times
    traffic: dict[str, float]
    """bytes that the busiest stage's rank sends a step, by group"""
    host_bytes: float
    """of a node's memory, for what is offloaded"""

    @property
    def tokens_per_s(self) -> float:
        """Tokens of usual samples, of a device: `perf/throughput`."""
        return self.job.samples * self.job.usual / self.times.total / self.job.world_size


def fit(job: Job, gpu: Gpu) -> Fit:
    """Memory by phase, and whether a device has so much."""
    by_rank = {rank: phase_bytes(job, gpu, rank) for rank in job.distinct_ranks}
    phases = {}
    for phase in by_rank[0]:
        rank = max(by_rank, key=lambda r: sum(by_rank[r][phase].values()))
        phases[phase] = PhaseMemory(stage=rank, parts=by_rank[rank][phase])
    of_engine = engine(job, gpu)
    problems = [of_engine.problem] if of_engine.problem else []
    found = Fit(phases=phases, engine=of_engine, problems=())
    if found.peak > gpu.memory_bytes:
        fullest = found.phases[found.fullest]
        largest = max(fullest.parts, key=lambda part: fullest.parts[part])
        problems.append(
            f"{found.fullest} needs {found.peak / GB:.1f} GB on stage {fullest.stage}, a "
            f"{gpu.name} has {gpu.memory_bytes / GB:.0f}; most of it is {largest} "
            f"({fullest.parts[largest] / GB:.1f} GB)"
        )
    return dataclasses.replace(found, problems=tuple(problems))


def plan(
    job: Job, gpu: Gpu, *, found: Fit | None = None, efficiency: float = FLOPS_EFFICIENCY
) -> Plan:
    """All figures of a job.

    Args:
        job: what is planned.
        gpu: each device.
        found: of `fit`, if it is known already.
        efficiency: share of the peak that matrix products reach.
    """
    found = found or fit(job, gpu)
    sent = [step_traffic(job, rank) for rank in job.distinct_ranks]
    return Plan(
        job=job,
        gpu=gpu,
        fit=found,
        times=times(job, gpu, found.engine, efficiency=efficiency),
        traffic=max(sent, key=lambda groups: sum(groups.values())),
        host_bytes=max(_host_bytes(job, rank) for rank in job.distinct_ranks)
        * min(job.gpus_per_node, job.world_size),
    )


def _host_bytes(job: Job, rank: int) -> float:
    total = 0.0
    for role in job.specs:
        static, keeps = job.static(role, rank), job.keeps(role)
        total += static.weights * keeps.param_offload + static.optimizer * keeps.optimizer_offload
    return total


def as_json(found: Plan, given: Config | None = None) -> dict[str, Any]:
    """The plan as plain numbers; bytes and seconds. For `given` see `overrides`."""
    job = found.job
    return {
        "layout": job.layout.name,
        "overrides": overrides(job, given),
        "devices": job.world_size,
        "gpu": found.gpu.name,
        "fits": not found.fit.problems,
        "problems": list(found.fit.problems),
        "parameters": {
            role: model_elements(spec, head=HEADS[role]) for role, spec in job.specs.items()
        },
        "memory_bytes": {
            phase: {"stage": memory.stage, "total": memory.total, "parts": memory.parts}
            for phase, memory in found.fit.phases.items()
        },
        "engine": {
            "weights_bytes": found.fit.engine.weights,
            "cache_bytes": found.fit.engine.cache,
            "cache_tokens": found.fit.engine.cache_tokens,
        },
        "host_bytes_a_node": found.host_bytes,
        "traffic_bytes_a_rank": found.traffic,
        "seconds": found.times.seconds,
        "step_seconds": found.times.total,
        "bubble": found.times.bubble,
        "mfu": found.times.mfu,
        "tokens_per_s_and_device": found.tokens_per_s,
    }


SEARCHED = ("vpp", "ep", "etp", "sequence_parallel", "fsdp", "pipeline_layers")
"""Fields of `parallel` that a search sets, beside those of which a value is always told."""


def overrides(job: Job, given: Config | None = None) -> list[str]:
    """`key=value` arguments that give a config this layout.

    Args:
        job: of the layout.
        given: the config that they are for, whose own layout they replace; None: the job's.
    """
    section, config = job.config.parallel, job.config
    found = [f"parallel.{name}={getattr(section, name)}" for name in ("tp", "pp", "cp")]
    others = (ParallelSection(), section if given is None else given.parallel)
    for name in SEARCHED:
        value = getattr(section, name)
        if any(getattr(other, name) != value for other in others):
            found.append(f"parallel.{name}={_word(value)}")
    if not config.rollout.url and config.rollout.engine == "sglang":
        found += [f"rollout.tp={config.rollout.tp}", f"rollout.sleep={_word(config.rollout.sleep)}"]
    for role in reversed(job.trained_roles):
        settings = job.trained(role)
        if not settings.use_dynamic_bsz:
            found.append(f"{role}.micro_batch_size={settings.micro_batch_size}")
        memory = settings.memory
        found.append(f"{role}.memory.recompute={memory.recompute}")
        for part in ("param", "grad", "optimizer"):
            if getattr(memory, f"{part}_offload"):
                found.append(f"{role}.memory.{part}_offload=true")
    if config.uses_reference and config.reference.param_offload:
        found.append("reference.param_offload=true")
    scores = config.reward_model
    if scores.path and not scores.use_dynamic_bsz:
        found.append(f"reward_model.micro_batch_size={scores.micro_batch_size}")
    if scores.path and scores.param_offload:
        found.append("reward_model.param_offload=true")
    return found


def _word(value: bool | int | Sequence[int]) -> str:
    """As an override has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value).replace(" ", "")
