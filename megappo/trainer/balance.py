"""Moves samples between data-parallel ranks, once a step, so that all ranks have equal work.

Legend: D data-parallel ranks, B samples on this rank, S samples of one mini-batch on one rank, T
longest response. A rank's batch is B / S consecutive mini-batches of S samples. Sample i of rank r
in a mini-batch has the number r * S + i there, which is its place in the order of one rank alone.

Every mini-batch keeps the samples that it has over all ranks, and every rank keeps its count: only
who holds which sample changes. Losses are divided by counts of the whole mini-batch, so training
gives the same result, up to the order of sums, whatever moves.

The ranks gather lengths alone, make the same plan from them, and send each sample that moves to the
one rank that takes it. No rank ever holds the batch of all.

Left out: what no forward pass reads. `Completion.text`, `Prompt.data_source`, `ground_truth` and
`extra_info` are empty afterwards for every sample, moved or kept, so that nobody can rely on them:
rewards and records need them and come before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megappo.data.batching import balance
from megappo.distributed.exchange import Parcel, exchange, gather_equal
from megappo.distributed.parallel import ParallelContext
from megappo.types import Completion, Prompt, RolloutBatch

FINISH_REASONS = ("stop", "length")
"""A finish reason travels as its place here."""

MiniBatchPlan = list[list[int]]
"""For each rank the numbers of the samples that it gets, ascending."""


@dataclass(frozen=True, kw_only=True)
class Balancer:
    """Redistributes the batches of one run."""

    context: ParallelContext
    cost: Callable[[int], float]
    """tokens of a sample -> work of any unit"""
    samples_per_mini_batch: int
    """S, on one DP rank"""

    def rebalance(self, batch: RolloutBatch) -> tuple[RolloutBatch, Mapping[str, float]]:
        """The samples that this rank shall train on, in training order, and how much that helps.

        Collective over DP. Ranks of one replica call it alike and get the same samples. All fields
        that are set move with one permutation; the same ones must be set on every rank. Also with
        one DP rank the result is a new batch without texts.

        Args:
            batch: [B] with tensors on the CPU; B is a multiple of S and equal on all ranks.

        Returns:
            The batch, [B] with T the longest response on this rank now, and the metrics
            `balance/cost_ratio_before` and `_after` (largest over mean cost of the DP ranks, of the
            worst mini-batch; 1 is ideal) and `balance/moved_share` (samples that changed rank / all
            samples), all of them equal on all ranks.
        """
        size = self.samples_per_mini_batch
        assert len(batch) > 0, "a step has samples on every rank"
        assert len(batch) % size == 0, f"{len(batch)} samples are no mini-batches of {size}"
        mine = torch.tensor(
            [
                [len(prompt.token_ids), n]
                for prompt, n in zip(batch.prompts, batch.response_lengths, strict=True)
            ]
        )
        lengths = gather_equal(mine, self.context.data_group)
        totals: list[list[int]] = lengths.sum(dim=2).tolist()
        plan = plan_batch(totals, samples_per_mini_batch=size, cost=self.cost)
        moved = self._move(batch, plan, lengths)
        return moved, plan_metrics(plan, totals, samples_per_mini_batch=size, cost=self.cost)

    def _move(
        self, batch: RolloutBatch, plan: Sequence[MiniBatchPlan], lengths: Tensor
    ) -> RolloutBatch:
        """Sends and receives by plan; `lengths` is [D, B, 2], prompts and responses."""
        routes = _routes(plan, self.samples_per_mini_batch)
        me, wire = self.context.dp_rank, _Wire.of(batch)
        arrived = exchange(
            [wire.pack(batch, routes[me, d]) for d in range(self.context.dp)],
            self.context.data_group,
        )
        samples: dict[tuple[int, int], _Sample] = {}
        for source, parcel in enumerate(arrived):
            rows = routes[source, me]
            unpacked = wire.unpack(parcel, lengths[source, rows].tolist())
            samples |= {(source, b): s for b, s in zip(rows, unpacked, strict=True)}
        order = _order(plan, me, self.samples_per_mini_batch)
        return wire.join([samples[key] for key in order])


def plan_batch(
    totals: Sequence[Sequence[int]],
    *,
    samples_per_mini_batch: int,
    cost: Callable[[int], float],
) -> list[MiniBatchPlan]:
    """Who gets which sample, mini-batch by mini-batch. Deterministic.

    A mini-batch that the best plan found does not level better stays as it is.

    Args:
        totals: [D][B] tokens of each sample, prompt and response.
        samples_per_mini_batch: S.
        cost: tokens -> work.
    """
    return [
        _plan_mini_batch(mini, samples_per_mini_batch, cost)
        for mini in _mini_batches(totals, samples_per_mini_batch)
    ]


def plan_metrics(
    plan: Sequence[MiniBatchPlan],
    totals: Sequence[Sequence[int]],
    *,
    samples_per_mini_batch: int,
    cost: Callable[[int], float],
) -> dict[str, float]:
    """What a plan does, see `Balancer.rebalance`; arguments as of `plan_batch`."""
    size, num_ranks = samples_per_mini_batch, len(totals)
    minis = _mini_batches(totals, size)
    stay = _stay(num_ranks, size)
    num_moved = sum(
        number // size != rank
        for parts in plan
        for rank, part in enumerate(parts)
        for number in part
    )
    return {
        "balance/cost_ratio_before": max(cost_ratio(stay, mini, cost) for mini in minis),
        "balance/cost_ratio_after": max(
            cost_ratio(parts, mini, cost) for parts, mini in zip(plan, minis, strict=True)
        ),
        "balance/moved_share": num_moved / sum(len(mini) for mini in minis),
    }


def cost_ratio(parts: MiniBatchPlan, lengths: Sequence[int], cost: Callable[[int], float]) -> float:
    """Largest over mean cost of the parts: the time lost to waiting is this minus one."""
    loads = [sum(cost(lengths[number]) for number in part) for part in parts]
    return max(loads) * len(loads) / sum(loads)


def _mini_batches(totals: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """[D][B] -> for each mini-batch the lengths of its D x S samples by number."""
    return [
        [n for of_rank in totals for n in of_rank[start : start + size]]
        for start in range(0, len(totals[0]), size)
    ]


def _stay(num_ranks: int, size: int) -> MiniBatchPlan:
    """The plan that moves nothing."""
    return [list(range(r * size, (r + 1) * size)) for r in range(num_ranks)]


def _plan_mini_batch(
    lengths: Sequence[int], size: int, cost: Callable[[int], float]
) -> MiniBatchPlan:
    num_ranks = len(lengths) // size
    stay = _stay(num_ranks, size)
    parts = balance(lengths, num_ranks, cost=cost)
    if cost_ratio(stay, lengths, cost) <= cost_ratio(parts, lengths, cost):
        return stay
    return _match(parts, lengths, size)


def _match(parts: list[list[int]], lengths: Sequence[int], size: int) -> MiniBatchPlan:
    """Orders parts by rank: greedily, each to the rank that holds most of its tokens already."""
    held: dict[tuple[int, int], int] = defaultdict(int)
    for p, part in enumerate(parts):
        for number in part:
            held[p, number // size] += lengths[number]
    rank_of: dict[int, int] = {}
    taken: set[int] = set()
    for p, rank in sorted(held, key=lambda pair: (-held[pair], pair)):
        if p not in rank_of and rank not in taken:
            rank_of[p] = rank
            taken.add(rank)
    free = iter(rank for rank in range(len(parts)) if rank not in taken)
    ranks = [rank_of[p] if p in rank_of else next(free) for p in range(len(parts))]
    return [part for _, part in sorted(zip(ranks, parts, strict=True))]


def _order(plan: Sequence[MiniBatchPlan], rank: int, size: int) -> list[tuple[int, int]]:
    """(rank that had it, its row there) of each sample that `rank` gets, in training order."""
    return [
        (number // size, m * size + number % size)
        for m, parts in enumerate(plan)
        for number in parts[rank]
    ]


def _routes(plan: Sequence[MiniBatchPlan], size: int) -> dict[tuple[int, int], list[int]]:
    """(source, destination) -> rows of the source's batch that go there, ascending."""
    routes: dict[tuple[int, int], list[int]] = defaultdict(list)
    for destination in range(len(plan[0])):
        for source, row in _order(plan, destination, size):
            routes[source, destination].append(row)
    return routes


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """One sample with n response tokens, without padding."""

    prompt: Prompt
    completion: Completion
    tensors: dict[str, Tensor]
    """[n] or [1] of each tensor field that is set"""


@dataclass(frozen=True, kw_only=True)
class _Wire:
    """How samples become two flat buffers and come back.

    A sample's integers are its row, its finish reason, the prompt's ids, then each integer or bool
    field; its floats are each float field. A [B, T] field takes n elements, a [B] field one.
    """

    integers: dict[str, torch.dtype]
    """Names of integer and bool fields, and what they are stored as."""
    floats: tuple[str, ...]
    per_token: frozenset[str]
    """Fields of [B, T]; the others are [B]."""

    @classmethod
    def of(cls, batch: RolloutBatch) -> _Wire:
        """The fields that are set in a batch."""
        values = {f.name: getattr(batch, f.name) for f in fields(batch)}
        tensors = {name: v for name, v in values.items() if isinstance(v, Tensor)}
        others = {name for name, v in values.items() if v is not None} - set(tensors)
        assert others == {"prompts", "completions"}, f"no way to move the fields {sorted(others)}"
        for name, v in tensors.items():
            assert v.dtype in (torch.int64, torch.bool, torch.float32), (name, v.dtype)
            assert v.device.type == "cpu", (name, v.device)
        return cls(
            integers={n: v.dtype for n, v in tensors.items() if v.dtype != torch.float32},
            floats=tuple(n for n, v in tensors.items() if v.dtype == torch.float32),
            per_token=frozenset(n for n, v in tensors.items() if v.dim() == 2),
        )

    def pack(self, batch: RolloutBatch, rows: Sequence[int]) -> Parcel:
        """The given samples, one after the other."""
        integers = [torch.empty(0, dtype=torch.int64)]
        floats = [torch.empty(0, dtype=torch.float32)]
        for b in rows:
            prompt, completion = batch.prompts[b], batch.completions[b]
            assert completion.finish_reason in FINISH_REASONS, completion.finish_reason
            reason = FINISH_REASONS.index(completion.finish_reason)
            integers.append(torch.tensor([prompt.row, reason, *prompt.token_ids]))
            n = len(completion.token_ids)
            integers += [self._cut(batch, name, b, n).long() for name in self.integers]
            floats += [self._cut(batch, name, b, n) for name in self.floats]
        return Parcel(integers=torch.cat(integers), floats=torch.cat(floats))

    def unpack(self, parcel: Parcel, lengths: Sequence[Sequence[int]]) -> list[_Sample]:
        """What `pack` put in; `lengths` are (prompt, response) tokens of each sample."""
        integers = iter(
            parcel.integers.split(
                [size for p, n in lengths for size in (2, p, *self._sizes(self.integers, n))]
            )
        )
        floats = iter(
            parcel.floats.split([size for _, n in lengths for size in self._sizes(self.floats, n)])
        )
        return [self._next_sample(integers, floats) for _ in lengths]

    def join(self, samples: Sequence[_Sample]) -> RolloutBatch:
        """A batch padded to its longest response."""
        names = (*self.integers, *self.floats)
        joined = {name: [sample.tensors[name] for sample in samples] for name in names}
        return RolloutBatch(
            prompts=tuple(sample.prompt for sample in samples),
            completions=tuple(sample.completion for sample in samples),
            **{
                name: pad_sequence(values, batch_first=True)
                if name in self.per_token
                else torch.cat(values)
                for name, values in joined.items()
            },
        )

    def _next_sample(self, integers: Iterator[Tensor], floats: Iterator[Tensor]) -> _Sample:
        row, reason = next(integers).tolist()
        prompt_ids = tuple(next(integers).tolist())
        tensors = {name: next(integers).to(dtype) for name, dtype in self.integers.items()}
        tensors |= {name: next(floats) for name in self.floats}
        return _Sample(
            prompt=Prompt(
                row=row, token_ids=prompt_ids, data_source="", ground_truth="", extra_info={}
            ),
            completion=Completion(
                token_ids=tuple(tensors["responses"].tolist()),
                log_probs=tuple(tensors["rollout_log_probs"].tolist()),
                finish_reason=FINISH_REASONS[reason],
                text="",
            ),
            tensors=tensors,
        )

    def _sizes(self, names: Iterable[str], n: int) -> list[int]:
        return [n if name in self.per_token else 1 for name in names]

    def _cut(self, batch: RolloutBatch, name: str, b: int, n: int) -> Tensor:
        value: Tensor = getattr(batch, name)
        return value[b, :n] if name in self.per_token else value[b : b + 1]
