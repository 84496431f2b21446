"""Seconds of each phase by a roofline: the slowest stage, its products, links and memory.

A pass takes its matrix products at `FLOPS_EFFICIENCY` of the peak, and then its exchanges over TP,
EP and PP at `LINK_EFFICIENCY` of the link; the ring of CP hides behind attention as far as that is
long. m micro-batches in p stages of v chunks take (m + (p - 1) / v) passes of the slowest stage:
the bubble is (p - 1) / (v m) of the ideal time (Narayanan et al. 2021, section 2.2). An optimizer
step adds its exchange over DP, less what `parallel.overlap_*` hides behind one pass, and reads and
writes its state. Decoding reads weights and cache once a token of a batch, or computes, whichever
takes longer. A group that spans more than a node has the network's bandwidth.

These are times of a machine that does nothing else: no stragglers, no host work, no rewards. They
rank layouts; that they are a run's times is not claimed, and none was measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megappo.data.cost import SequenceCost
from megappo.planner.constants import (
    DECODE_LATENCY_S,
    DTYPE_BYTES,
    FLOPS_EFFICIENCY,
    HOST_BYTES_PER_S,
    LINK_EFFICIENCY,
    MEMORY_EFFICIENCY,
    Gpu,
)
from megappo.planner.flops import mfu, train_flops
from megappo.planner.job import HEADS, Job
from megappo.planner.phases import Engine, cache_token_bytes, engine_requests, engine_tp
from megappo.planner.traffic import pass_traffic, push_bytes, ring, update_traffic

_FORWARD = {
    "reward_model": "score", "actor": "log_probs", "reference": "ref", "critic": "values"
}  # fmt: skip
"""Phases of forward passes alone, in the order of a step."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of one step."""

    seconds: dict[str, float]
    """by phase"""
    bubble: float
    """of the actor's update: idle over ideal time"""
    mfu: dict[str, float]
    """of the updates of actor and critic, and of the whole step"""

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())


@dataclass(frozen=True, kw_only=True)
class _Pass:
    forward: float
    backward: float


def times(job: Job, gpu: Gpu, of_engine: Engine, *, efficiency: float = FLOPS_EFFICIENCY) -> Times:
    """Seconds by phase, bubble and MFU.

    Args:
        job: what is planned.
        gpu: each device.
        of_engine: from `phases.engine`.
        efficiency: share of the peak that matrix products reach.
    """
    speed = gpu.flops_per_s * efficiency
    seconds = {"generate": generate_seconds(job, gpu, of_engine, speed=speed)}
    for role, phase in _FORWARD.items():
        if role in job.specs:
            slowest = max(_pass(job, gpu, role, r, speed).forward for r in job.distinct_ranks)
            passes = job.micro(role).num_passes * job.num_forwards(role)
            seconds[phase] = slowest * (passes + _fill(job))
    for role in job.trained_roles:
        seconds[f"update_{role}"] = _update(job, gpu, role, speed)
    seconds["sync"] = _push(job, gpu)
    if moved := max(offload_bytes(job, rank) for rank in job.distinct_ranks):
        seconds["offload"] = moved / HOST_BYTES_PER_S
    bubble = _fill(job) / job.micro("actor").num_passes
    return Times(seconds=seconds, bubble=bubble, mfu=_shares(job, gpu, seconds))


def _shares(job: Job, gpu: Gpu, seconds: Mapping[str, float]) -> dict[str, float]:
    """MFU of each role's updates, and of the whole step with the operations of all updates."""
    epochs, done, shares = job.config.actor.ppo_epochs, 0.0, {}

    def share(flops: float, taken: float) -> float:
        return mfu(
            flops,
            seconds=taken,
            num_devices=job.world_size,
            peak_flops_per_s=gpu.flops_per_s,
        )

    for role in reversed(job.trained_roles):
        one = train_flops(job.specs[role], [job.usual], head=HEADS[role])
        flops = epochs * one * job.samples
        shares[role] = share(flops, seconds[f"update_{role}"])
        done += flops
    return shares | {"step": share(done, sum(seconds.values()))}


def offload_bytes(job: Job, rank: int) -> float:
    """What a step copies between device and host, both ways; gradient buffers are only freed."""
    uses = {"actor": 3, "critic": 2, "reference": 1, "reward_model": 1}  # passes, update, push
    total = 0.0
    for role in job.specs:
        static, keeps = job.static(role, rank), job.keeps(role)
        total += 2 * uses[role] * static.weights * keeps.param_offload
        total += 2 * static.optimizer * keeps.optimizer_offload
    return total


def _fill(job: Job) -> float:
    """Passes that a pipeline takes to fill and to drain."""
    return (job.layout.pp - 1) / job.layout.vp


def _link(job: Job, gpu: Gpu, span: int) -> float:
    """Bytes a second in a group of ranks that lie within `span` consecutive ones."""
    within = span <= job.gpus_per_node
    bandwidth = gpu.link_bytes_per_s if within else gpu.network_bytes_per_s
    return bandwidth * LINK_EFFICIENCY


def _links(job: Job, gpu: Gpu) -> dict[str, float]:
    layout = job.layout
    return {
        "tp": _link(job, gpu, layout.tp),
        "cp": _link(job, gpu, layout.tp * layout.cp),
        "ep": _link(job, gpu, layout.etp * layout.ep),
        "pp": _link(job, gpu, job.world_size),
        "dp": _link(job, gpu, layout.tp * layout.cp * layout.dp),
    }


def _pass(job: Job, gpu: Gpu, role: str, rank: int, speed: float) -> _Pass:
    """One micro-batch of usual samples on one stage."""
    spec, layout = job.specs[role], job.layouts[role]
    stage, tokens = job.stage(role, rank), job.micro(role).mean_tokens
    cost = SequenceCost.of_model(spec)
    top = 2 * spec.hidden_size * spec.vocab_size
    share = sum(chunk.num_layers for chunk in stage) / spec.num_layers / layout.tp
    products = tokens * share * (cost.per_token - top) / speed
    attention = tokens * share * cost.per_pair * (job.usual + 1) / 2 / speed
    has_logits = stage[-1].has_head and HEADS[role] == "lm"
    head = tokens * top / layout.tp / speed if has_logits else 0.0
    sent = pass_traffic(spec, layout, stage, tokens=tokens, dtype=job.config.model.dtype)
    links = _links(job, gpu)

    def exchanged(bytes_by_group: dict[str, float], of_attention: float) -> float:
        plain = sum(bytes_by_group[g] / links[g] for g in ("tp", "ep", "pp"))
        return plain + max(0.0, bytes_by_group["cp"] / links["cp"] - of_attention)

    layers = products + attention + exchanged(sent.forward, attention)
    backward = 2 * (products + attention + head) + exchanged(sent.backward, 2 * attention)
    recompute = job.keeps(role).recompute
    if recompute == "full":
        backward += layers - sent.forward["pp"] / links["pp"]
    elif recompute == "selective":
        backward += attention
    return _Pass(forward=layers + head, backward=backward)


def _update(job: Job, gpu: Gpu, role: str, speed: float) -> float:
    micro, links, slowest = job.micro(role), _links(job, gpu), 0.0
    for rank in job.distinct_ranks:
        one = _pass(job, gpu, role, rank, speed)
        exchange = update_traffic(job, role, rank)
        reduce, gather = exchange.gradients / links["dp"], exchange.weights / links["dp"]
        layout = job.config.parallel
        if layout.overlap_grad_reduce or layout.fsdp:
            reduce = max(0.0, reduce - one.backward)
        if layout.overlap_param_gather or layout.fsdp:
            gather = max(0.0, gather - one.forward)
        state = 2 * job.static(role, rank).optimizer / (gpu.memory_bytes_per_s * MEMORY_EFFICIENCY)
        passes = (micro.num_passes + _fill(job)) * (one.forward + one.backward)
        slowest = max(slowest, passes + reduce + gather + state)
    return slowest * job.num_updates


def generate_seconds(job: Job, gpu: Gpu, of_engine: Engine, *, speed: float) -> float:
    """Prompts at the speed of products, then a token of every running response at a time.

    0 where servers of others generate: their time is not known here.

    Args:
        job: what is planned.
        gpu: each device.
        of_engine: from `phases.engine`.
        speed: operations a second of a device.
    """
    rollout, spec, dtype = job.config.rollout, job.specs["actor"], job.config.model.dtype
    if rollout.url:
        return 0.0
    tp, requests = engine_tp(job), engine_requests(job)
    response = job.usual - job.config.data.max_prompt_length
    fitting = max(1, of_engine.cache_tokens // job.usual)
    running = max(1, min(requests, rollout.max_running_requests, fitting))
    cost = SequenceCost.of_model(spec)
    prefill = requests * cost(job.config.data.max_prompt_length) / tp / speed
    length = job.config.data.max_prompt_length + response / 2
    compute = running * (cost.per_token + cost.per_pair * length) / tp / speed
    weights = of_engine.weights or job.static("actor", 0).weights
    read = weights + running * length * cache_token_bytes(spec, tp=tp, dtype=dtype)
    memory = read / (gpu.memory_bytes_per_s * MEMORY_EFFICIENCY)
    reduced = 2 * spec.num_layers * 2 * running * spec.hidden_size * DTYPE_BYTES[dtype]
    exchange = ring(reduced, tp) / _link(job, gpu, tp)
    step = max(compute, memory) + exchange + spec.num_layers * DECODE_LATENCY_S
    return prefill + requests / running * response * step


def _push(job: Job, gpu: Gpu) -> float:
    """Whole weights into every replica, over the widest group that they are split over."""
    layout = job.layout
    span = job.world_size if layout.pp > 1 else layout.tp * layout.cp * layout.dp
    if layout.pp == 1 and layout.ep == 1 and not layout.fsdp:
        span = layout.tp
    received = max(push_bytes(job, rank) for rank in job.distinct_ranks)
    return received / _link(job, gpu, span)
