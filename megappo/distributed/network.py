"""How fast ranks talk: collectives of each parallel group, and every pair of ranks.

All groups of a kind work at once, as in training, so that links which they share show. Pairs meet
in rounds (the circle method of tournaments): in each round every rank exchanges with one other, and
after n - 1 rounds each pair has met once.

Bandwidth is what nccl-tests calls bus bandwidth: bytes that cross a rank's link a second, so that
numbers of different collectives and group sizes can be compared. For n ranks and S bytes in all:
2 (n - 1) / n S / t for all-reduce, (n - 1) / n S / t for all-gather and reduce-scatter.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megappo.distributed.parallel import ParallelContext, all_gather_objects, barrier

_SMALL = 256
"""float32 elements of a message whose time is latency."""
_REPEATS = 5
_EXCHANGES = 40
"""Of a pair, whose mean counts: a rank that is held up now and then has a good median."""
SLOW = 3.0
"""A pair is slow that takes so many times as long as is typical on one host, or between hosts."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One collective of one group."""

    kind: str
    """tp, cp, ..."""
    ranks: tuple[int, ...]
    collective: str
    latency_us: float
    bandwidth_gb_s: float


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The exchange of one message between two ranks, both ways at once."""

    ranks: tuple[int, int]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Network:
    """What was measured, the same on all ranks."""

    hosts: tuple[str, ...]
    """of each rank"""
    speeds: tuple[Speed, ...]
    pairs: tuple[Pair, ...]
    pair_bytes: int

    def typical_s(self, *, same_host: bool) -> float | None:
        """Of pairs on one host, or on two, the time that a quarter of them keeps; None without any.

        Not the median: one slow rank of four is in half of all pairs.
        """
        times = sorted(p.seconds for p in self.pairs if self._same_host(p) == same_host)
        return times[len(times) // 4] if times else None

    def ratio(self, pair: Pair) -> float:
        """A pair's time over what is typical for its kind."""
        typical = self.typical_s(same_host=self._same_host(pair))
        assert typical is not None
        return pair.seconds / typical

    def slow_pairs(self) -> list[Pair]:
        """Pairs that take over `SLOW` times as long as is typical, slowest first."""
        found = [pair for pair in self.pairs if self.ratio(pair) > SLOW]
        return sorted(found, key=lambda pair: -self.ratio(pair))

    def _same_host(self, pair: Pair) -> bool:
        one, other = pair.ranks
        return self.hosts[one] == self.hosts[other]

    def slow_rank(self) -> int | None:
        """The rank that has most to do with slow pairs, if it is in each of them.

        With three ranks and more a rank, and not a link, is slow if most of its pairs are.
        """
        slow = self.slow_pairs()
        ranks = range(len(self.hosts))
        common = [rank for rank in ranks if slow and all(rank in pair.ranks for pair in slow)]
        if len(common) == 1 and 2 * len(slow) > len(self.hosts) - 1:
            return common[0]
        return None


def measure(context: ParallelContext, *, num_bytes: int) -> Network:
    """Measures all groups and pairs with messages of `num_bytes`. Collective over the world."""
    elements = max(1, num_bytes // 4)
    speeds: list[Speed] = []
    for kind, group in _groups():
        speeds += _collectives(kind, group, context, elements)
    pairs = _pairs(context, elements)
    told = all_gather_objects((socket.gethostname(), speeds, pairs), context.world_group)
    all_speeds: dict[tuple[str, tuple[int, ...], str], Speed] = {}
    for _, of_rank, _ in told:
        for speed in of_rank:  # the slowest rank's word counts
            key = (speed.kind, speed.ranks, speed.collective)
            known = all_speeds.get(key, speed)
            all_speeds[key] = min(known, speed, key=lambda s: s.bandwidth_gb_s)
    return Network(
        hosts=tuple(host for host, _, _ in told),
        speeds=tuple(all_speeds.values()),
        pairs=tuple(sorted((p for _, _, met in told for p in met), key=lambda p: p.ranks)),
        pair_bytes=elements * 4,
    )


def _groups() -> list[tuple[str, Any]]:
    """Groups of this rank that hold more than one rank; each set of ranks once."""
    from megatron.core import parallel_state as ps

    of_kind = {
        "tp": ps.get_tensor_model_parallel_group(),
        "cp": ps.get_context_parallel_group(),
        "pp": ps.get_pipeline_model_parallel_group(),
        "dp": ps.get_data_parallel_group(),
        "dp x cp": ps.get_data_parallel_group(with_context_parallel=True),
        "ep": ps.get_expert_model_parallel_group(),
    }
    found: list[tuple[str, Any]] = []
    seen: set[tuple[int, ...]] = set()
    for kind, group in of_kind.items():
        ranks = tuple(dist.get_process_group_ranks(group))
        # Sizes are equal on all ranks, and so are these choices.
        if len(ranks) > 1 and ranks not in seen:
            seen.add(ranks)
            found.append((kind, group))
    return found


def _collectives(kind: str, group: Any, context: ParallelContext, elements: int) -> list[Speed]:
    """Collective over the world; every group of the kind at once."""
    ranks = tuple(dist.get_process_group_ranks(group))
    n = len(ranks)

    def shapes(count: int) -> dict[str, tuple[Callable[[], Any], float]]:
        part = torch.zeros(max(1, count // n), device=context.device)
        whole = torch.zeros(part.numel() * n, device=context.device)
        size = whole.numel() * 4
        return {
            "all-reduce": (lambda: dist.all_reduce(whole, group=group), 2 * (n - 1) / n * size),
            "all-gather": (
                lambda: dist.all_gather_into_tensor(whole, part, group=group),
                (n - 1) / n * size,
            ),
            "reduce-scatter": (
                lambda: dist.reduce_scatter_tensor(part, whole, group=group),
                (n - 1) / n * size,
            ),
        }

    small, large = shapes(_SMALL), shapes(elements)
    found = []
    for name in small:
        latency = _median_time(small[name][0], context)
        seconds = _median_time(large[name][0], context)
        found.append(
            Speed(
                kind=kind,
                ranks=ranks,
                collective=name,
                latency_us=latency * 1e6,
                bandwidth_gb_s=large[name][1] / seconds / 1e9,
            )
        )
    return found


def _pairs(context: ParallelContext, elements: int) -> list[Pair]:
    """Pairs in which this rank is the lower one. Collective over the world."""
    sent = torch.zeros(elements, device=context.device)
    received = torch.zeros_like(sent)
    found = []
    for partners in rounds(context.world_size):
        partner = partners.get(context.rank)
        if partner is None:  # an odd number of ranks: this one rests
            barrier(context)
            continue

        def exchange(partner: int = partner) -> None:
            requests = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
            )
            for request in requests:
                request.wait()

        seconds = _mean_time(exchange, context)
        if context.rank < partner:
            found.append(Pair(ranks=(context.rank, partner), seconds=seconds))
    return found


def rounds(num_ranks: int) -> list[dict[int, int]]:
    """Partners of each round, so that every pair meets once; who is left out in it rests."""
    seats: list[int | None] = [*range(num_ranks)]
    if num_ranks % 2:
        seats.append(None)
    result = []
    for _ in range(len(seats) - 1):
        partners: dict[int, int] = {}
        for one, other in zip(seats[: len(seats) // 2], reversed(seats), strict=False):
            if one is not None and other is not None:
                partners |= {one: other, other: one}
        result.append(partners)
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return result


def _median_time(work: Callable[[], Any], context: ParallelContext) -> float:
    """Seconds of one call, after one to warm up. Collective over the world by a barrier."""
    barrier(context)
    work()
    _finish(context)
    times: list[float] = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        _finish(context)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _mean_time(work: Callable[[], Any], context: ParallelContext) -> float:
    """As `_median_time`, but the mean over `_EXCHANGES` calls."""
    barrier(context)
    work()
    _finish(context)
    started = time.perf_counter()
    for _ in range(_EXCHANGES):
        work()
        _finish(context)
    return (time.perf_counter() - started) / _EXCHANGES


def _finish(context: ParallelContext) -> None:
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)


def slowest_of_each(speeds: Sequence[Speed]) -> list[Speed]:
    """Of each kind and collective the slowest group."""
    slowest: dict[tuple[str, str], Speed] = {}
    for speed in speeds:
        key = (speed.kind, speed.collective)
        slowest[key] = min(slowest.get(key, speed), speed, key=lambda s: s.bandwidth_gb_s)
    return list(slowest.values())
