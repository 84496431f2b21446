"""Every layout of a number of devices, the best that fit, and why the others do not.

A layout is refused by the rules of a run itself (the config's sections, the batch arithmetic, what
models and engines can be split into), or because none of its memory settings fits: recomputation
none, selective or full; memory settings as configured, or with everything offloaded and the engine
asleep; micro-batches as configured or of one sample. Of those that fit the fastest by the roofline
stands for its layout.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megappo.config import Config
from megappo.config.batch_plan import plan_batches
from megappo.config.checks import check_sections
from megappo.config.layout import MemorySection
from megappo.config.reward_model import RewardModelSection
from megappo.errors import UserError
from megappo.models.build import Recompute, check_layout
from megappo.models.spec import ModelSpec
from megappo.planner.constants import (
    FLOPS_EFFICIENCY,
    MAX_CP,
    MAX_TP,
    MIN_CP_TOKENS,
    SEARCHED_VPP,
    Gpu,
)
from megappo.planner.job import Job
from megappo.planner.layout import Layout
from megappo.planner.phases import engine
from megappo.planner.plan import Fit, Plan, fit, plan
from megappo.planner.timing import generate_seconds

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")

REASON_WORDS = 60
"""Characters by which reasons are told apart, numbers aside."""

EngineRule = Callable[[ModelSpec, int], None]
"""Raises a `UserError` where an engine cannot be split over so many devices."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A layout that cannot be had."""

    layout: str
    kind: str
    """`rule` or `memory`"""
    reason: str
    peak_bytes: float = 0.0
    """that the leanest settings need, of what lacks memory"""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search came to."""

    given: Config
    """what was searched for; its own layout is replaced"""
    plans: tuple[Plan, ...]
    """one a layout, fastest first"""
    refused: tuple[Refused, ...]

    @property
    def num_tried(self) -> int:
        """Layouts."""
        return len(self.plans) + len(self.refused)


def problems_of(
    config: Config, specs: Mapping[str, ModelSpec], *, world_size: int, gpus_per_node: int
) -> list[str]:
    """Rules of a run that a layout breaks, as `megappo check` says them."""
    problems = check_sections(config)
    local = min(world_size, gpus_per_node)
    _, broken = plan_batches(config, world_size, local_world_size=local)
    problems += broken
    if broken:
        return problems
    for role, spec in specs.items():
        layout = Layout.of(config.parallel, spec, world_size=world_size)
        try:
            check_layout(
                spec,
                tp=layout.tp,
                pp=layout.pp,
                vp=layout.vp,
                ep=layout.ep,
                etp=layout.etp if spec.num_experts else None,
                sequence_parallel=layout.sequence_parallel,
                pipeline_layers=layout.pipeline_layers,
            )
        except UserError as error:
            problems.append(f"the {role}: {error}")
            break
    return problems


def search(
    config: Config,
    specs: Mapping[str, ModelSpec],
    gpu: Gpu,
    *,
    world_size: int,
    gpus_per_node: int,
    engine_rule: EngineRule,
    mean_response: int = 0,
    efficiency: float = FLOPS_EFFICIENCY,
) -> Found:
    """Tries every layout.

    Args:
        config: of the run; its `parallel` section, `rollout.tp` and memory settings are varied.
        specs: of the roles.
        gpu: each device.
        world_size: devices.
        gpus_per_node: of them.
        engine_rule: whether an engine can be split.
        mean_response: tokens of a usual response; 0: the longest.
        efficiency: share of the peak that matrix products reach.
    """

    def job_of(candidate: Config) -> Job:
        return Job.of(
            candidate,
            specs,
            world_size=world_size,
            gpus_per_node=gpus_per_node,
            mean_response=mean_response,
        )

    base, reason = _with_engine(config, specs["actor"], gpu, job_of, engine_rule)
    if reason:
        none = Refused(layout="all", kind="memory", reason=reason)
        return Found(given=config, plans=(), refused=(none,))
    plans, refused = [], []
    for sizes in _sizes(job_of(base), world_size, gpus_per_node):
        name, candidate, problems = _candidate(base, specs, sizes, world_size, gpus_per_node)
        if candidate is None:
            refused.append(Refused(layout=name, kind="rule", reason=problems[0]))
            continue
        found = _best_settings(candidate, job_of, gpu, efficiency)
        if isinstance(found, Plan):
            plans.append(found)
        else:
            reason = f"at its leanest {found.problems[-1]}"
            refused.append(
                Refused(layout=name, kind="memory", reason=reason, peak_bytes=found.peak)
            )
    plans.sort(key=lambda p: p.times.total)
    return Found(given=config, plans=tuple(plans), refused=tuple(refused))


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    tp: int
    pp: int
    vp: int
    cp: int
    ep: int


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length()) if 2**i <= limit]


def _sizes(job: Job, world_size: int, gpus_per_node: int) -> Iterator[_Sizes]:
    """Every product of degrees; those that break a rule are told of later."""
    layers = min(spec.num_layers for spec in job.specs.values())
    experts = max(spec.num_experts for spec in job.specs.values())
    pps = sorted({*_powers(layers), *(p for p in range(1, layers + 1) if layers % p == 0)})
    for tp, pp, cp, ep in itertools.product(
        _powers(min(MAX_TP, gpus_per_node, world_size)),
        [p for p in pps if p <= world_size],
        _powers(max(1, min(MAX_CP, world_size, job.longest // MIN_CP_TOKENS))),
        _powers(min(experts, world_size)) if experts else [1],
    ):
        if world_size % (tp * pp * cp):
            continue
        for vp in SEARCHED_VPP if pp > 1 else (1,):
            yield _Sizes(tp=tp, pp=pp, vp=vp, cp=cp, ep=ep)


def _candidate(
    base: Config,
    specs: Mapping[str, ModelSpec],
    sizes: _Sizes,
    world_size: int,
    gpus_per_node: int,
) -> tuple[str, Config | None, list[str]]:
    """The layout's name, and its config or the rules that it breaks.

    Micro-batches of one sample stand in for larger ones that do not divide a mini-batch.
    """
    section = replace(
        base.parallel,
        tp=sizes.tp,
        pp=sizes.pp,
        vpp=sizes.vp,
        cp=sizes.cp,
        ep=sizes.ep,
        etp=1 if sizes.ep > 1 and sizes.tp > 1 else 0,
        sequence_parallel=sizes.tp > 1,
        pipeline_layers=[],
        fsdp=False,
    )
    name = Layout.of(section, specs["actor"], world_size=world_size).name
    candidate = replace(base, parallel=section)
    problems: list[str] = []
    for attempt in (candidate, _of_one_sample(candidate)):
        problems = problems_of(attempt, specs, world_size=world_size, gpus_per_node=gpus_per_node)
        if not problems:
            return name, attempt, []
    return name, None, problems


def _of_one_sample(config: Config) -> Config:
    return replace(
        config,
        actor=replace(config.actor, micro_batch_size=1),
        critic=replace(config.critic, micro_batch_size=1),
        reward_model=_scoring(config, micro_batch_size=1),
    )


def _scoring(config: Config, **changes: Any) -> RewardModelSection:
    """The reward model's section, changed where there is a reward model."""
    section = config.reward_model
    return replace(section, **changes) if section.path else section


def _with_engine(
    config: Config,
    spec: ModelSpec,
    gpu: Gpu,
    job_of: Callable[[Config], Job],
    engine_rule: EngineRule,
) -> tuple[Config, str]:
    """The config with the `rollout.tp` that generates fastest, or why there is none."""
    if config.rollout.url or config.rollout.engine != "sglang":
        return config, ""
    best: tuple[float, Config] | None = None
    reason = ""
    size = job_of(config)
    for tp in _powers(min(size.gpus_per_node, size.world_size)):
        candidate = replace(config, rollout=replace(config.rollout, tp=tp))
        try:
            engine_rule(spec, tp)
        except UserError as error:
            reason = reason or str(error)
            continue
        job = job_of(replace(candidate, parallel=type(config.parallel)()))
        of_engine = engine(job, gpu)
        if of_engine.problem:
            reason = of_engine.problem
            continue
        seconds = generate_seconds(job, gpu, of_engine, speed=gpu.flops_per_s * FLOPS_EFFICIENCY)
        if best is None or seconds < best[0]:
            best = (seconds, candidate)
    return (config, reason) if best is None else (best[1], "")


def _best_settings(
    config: Config, job_of: Callable[[Config], Job], gpu: Gpu, efficiency: float
) -> Plan | Fit:
    """The fastest of the memory settings that fit, or what the leanest lacks."""
    small = _of_one_sample(config)
    leanest = fit(job_of(_offloaded(_recomputing(small, "full"))), gpu)
    if leanest.problems:
        return leanest
    sizes = (config,) if small == config else (config, small)
    settings = [made for sized in sizes for made in (sized, _offloaded(sized))]
    found = [_fastest(made, job_of, gpu, efficiency) for made in settings]
    return min((one for one in found if one is not None), key=lambda one: one.times.total)


def _fastest(
    config: Config, job_of: Callable[[Config], Job], gpu: Gpu, efficiency: float
) -> Plan | None:
    """The least recomputation that fits: it is the fastest."""
    for recompute in RECOMPUTE:
        job = job_of(_recomputing(config, recompute))
        found = fit(job, gpu)
        if not found.problems:
            return plan(job, gpu, found=found, efficiency=efficiency)
    return None


def _recomputing(config: Config, recompute: Recompute) -> Config:
    return replace(
        config,
        actor=replace(config.actor, memory=replace(config.actor.memory, recompute=recompute)),
        critic=replace(config.critic, memory=replace(config.critic.memory, recompute=recompute)),
    )


def _offloaded(config: Config) -> Config:
    """One model at a time on the device, and engines of our own asleep while they work."""

    def away(section: MemorySection) -> MemorySection:
        return replace(section, param_offload=True, grad_offload=True, optimizer_offload=True)

    sleeps = config.rollout.engine == "sglang" and not config.rollout.url
    return replace(
        config,
        actor=replace(config.actor, memory=away(config.actor.memory)),
        critic=replace(config.critic, memory=away(config.critic.memory)),
        reference=replace(config.reference, param_offload=True),
        reward_model=_scoring(config, param_offload=True),
        rollout=replace(config.rollout, sleep=sleeps or config.rollout.sleep),
    )


def summary(refused: Sequence[Refused]) -> list[tuple[int, Refused]]:
    """Refusals by kind of reason, the commonest first: how many, and one of them in full.

    Of those for memory the one that lacks least is shown.
    """
    groups: dict[str, list[Refused]] = {}
    for one in refused:
        words = one.reason[:REASON_WORDS] if one.kind == "rule" else one.kind
        groups.setdefault(re.sub(r"\d+", "#", words), []).append(one)
    rows = [
        (len(members), min(members, key=lambda one: one.peak_bytes)) for members in groups.values()
    ]
    return sorted(rows, key=lambda row: -row[0])
