"""Sums, counts and maxima of a step, reduced over ranks without a rank that collects them.

Every rank names the same metrics; one that has nothing to say about one of them adds zero. The
bytes a rank sends are therefore fixed by the number of metrics, not by the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megappo.distributed.parallel import ParallelContext


@dataclass
class Tally:
    """Running (sum, count) pairs and maxima of one rank."""

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, total: float, count: float) -> None:
        """Adds to a mean: the metric is sum of totals / sum of counts."""
        old_total, old_count = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (old_total + float(total), old_count + float(count))

    def add_max(self, name: str, value: float) -> None:
        """Raises a maximum; NaN counts as infinity, so that it shows."""
        found = float("inf") if math.isnan(value) else float(value)
        self.maxima[name] = max(self.maxima.get(name, float("-inf")), found)

    def declare(self, means: Iterable[str] = (), maxima: Iterable[str] = ()) -> None:
        """Names metrics that this rank may have nothing to add to."""
        for name in means:
            self.sums.setdefault(name, (0.0, 0.0))
        for name in maxima:
            self.maxima.setdefault(name, float("-inf"))

    def merge(self, other: Tally) -> None:
        """Adds everything of another tally."""
        for name, (total, count) in other.sums.items():
            self.add(name, total, count)
        for name, value in other.maxima.items():
            self.add_max(name, value)


def reduce_tally(tally: Tally, context: ParallelContext) -> Mapping[str, float]:
    """Means and maxima over all ranks; a mean of nothing is 0, a maximum of nothing is left out.

    Collective over the world; every rank must have named the same metrics.
    """
    names, peaks = sorted(tally.sums), sorted(tally.maxima)
    pairs = torch.tensor([tally.sums[n] for n in names], dtype=torch.float64).reshape(-1, 2)
    tops = torch.tensor([tally.maxima[n] for n in peaks], dtype=torch.float64)
    if names:
        dist.all_reduce(pairs, group=context.world_group)
    if peaks:
        dist.all_reduce(tops, op=dist.ReduceOp.MAX, group=context.world_group)
    means = {
        name: (total / count if count else 0.0)
        for name, (total, count) in zip(names, pairs.tolist(), strict=True)
    }
    found = {n: v for n, v in zip(peaks, tops.tolist(), strict=True) if v != float("-inf")}
    return {**means, **found}


def reduce_mean(tally: Tally, name: str, context: ParallelContext) -> float:
    """One mean of a tally over all ranks, NaN if it is NaN on any. Collective over the world."""
    one = Tally()
    one.add(name, *tally.sums.get(name, (0.0, 0.0)))
    return reduce_tally(one, context)[name]
