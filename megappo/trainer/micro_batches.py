"""Cuts a rank's samples into mini-batches and forward passes, equally many on every DP rank.

One plan serves a whole step: the log-prob passes and the update run the very same forward passes,
which is why the probability ratio before the first optimizer step is exactly 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from megappo.data.batching import fixed_micro_batches, plan_micro_batches
from megappo.distributed.parallel import ParallelContext, max_over_data, sum_over_data
from megappo.models.packing import Alignment
from megappo.types import MiniBatch, RolloutBatch


class PassSize(Protocol):
    """The part of a section that says how large forward passes are."""

    @property
    def micro_batch_size(self) -> int:
        """Samples."""

    @property
    def use_dynamic_bsz(self) -> bool:
        """Tokens instead of samples."""

    @property
    def max_token_len_per_gpu(self) -> int:
        """Tokens."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchPlanner:
    """How one model's samples are cut."""

    context: ParallelContext
    alignment: Alignment
    mini_batch: int
    """samples of a mini-batch on one DP rank"""
    micro_batch: int
    """samples of a forward pass; not used with a token budget"""
    max_tokens: int | None
    """most positions of a forward pass over all CP ranks of a replica; None: fixed counts"""

    @classmethod
    def of(
        cls,
        role: PassSize,
        *,
        context: ParallelContext,
        alignment: Alignment,
        mini_batch: int,
    ) -> MicroBatchPlanner:
        """A planner by a role's settings."""
        return cls(
            context=context,
            alignment=alignment,
            mini_batch=mini_batch,
            micro_batch=role.micro_batch_size,
            max_tokens=token_budget(role, alignment) if role.use_dynamic_bsz else None,
        )

    @property
    def size(self) -> str:
        """Of a forward pass, in words."""
        if self.max_tokens is not None:
            return f"{self.max_tokens} tokens"
        return f"{self.micro_batch} samples"

    def halved(self, longest: int) -> MicroBatchPlanner | None:
        """A planner of forward passes at most half as large; None if they cannot be smaller.

        Args:
            longest: tokens of the longest possible sample, which must fit in one.
        """
        if self.max_tokens is not None:
            row = self.alignment.row_multiple
            half = self.max_tokens // 2 // row * row
            fits = half >= self.alignment.padded(longest)
            return replace(self, max_tokens=half) if fits else None
        # More passes of one size: their number must stay a multiple of the old one under VPP.
        smaller = [n for n in range(1, self.micro_batch // 2 + 1) if self.micro_batch % n == 0]
        return replace(self, micro_batch=smaller[-1]) if smaller else None

    def plan(self, lengths: Sequence[int]) -> list[list[list[int]]]:
        """For each mini-batch its forward passes, as indices into the mini-batch.

        Collective over DP with a token budget: ranks agree on how many each mini-batch takes, and
        those with fewer samples get empty ones. Interleaved pipelines get a multiple of PP.

        Args:
            lengths: tokens of each of this rank's samples, whole mini-batches one after another.

        Raises:
            DataError: a sample is longer than the budget.
        """
        minis = [
            [self.alignment.padded(lengths[i]) for i in rows]
            for rows in fixed_micro_batches(len(lengths), self.mini_batch)
        ]
        if self.max_tokens is None:
            return [fixed_micro_batches(len(mini), self.micro_batch) for mini in minis]
        return [self._plan_one(mini, self.max_tokens) for mini in minis]

    def _plan_one(self, lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
        agreed = self._agree(len(plan_micro_batches(lengths, max_tokens=max_tokens)))
        return plan_micro_batches(lengths, max_tokens=max_tokens, num_micro_batches=agreed)

    def plan_any(self, lengths: Sequence[int]) -> list[list[int]]:
        """Forward passes of any number of samples, another one on each DP rank if need be.

        Collective over DP: all ranks get equally many, some of them perhaps empty.

        Args:
            lengths: tokens of each of this rank's samples.

        Raises:
            DataError: a sample is longer than the budget.
        """
        padded = [self.alignment.padded(length) for length in lengths]
        if self.max_tokens is not None:
            return self._plan_one(padded, self.max_tokens)
        passes = fixed_micro_batches(len(padded), self.micro_batch)
        return passes + [[] for _ in range(self._agree(len(passes)) - len(passes))]

    def _agree(self, alone: int) -> int:
        """Passes that every DP rank makes, this one's included. Collective over DP."""
        agreed = max_over_data(max(alone, 1), self.context)
        if self.context.vp > 1:
            agreed = -(-agreed // self.context.pp) * self.context.pp
        return agreed


def token_budget(role: PassSize, alignment: Alignment) -> int:
    """Most positions of a forward pass over all CP ranks, in whole multiples of a row's padding."""
    row = alignment.row_multiple
    return role.max_token_len_per_gpu * alignment.cp // row * row


def as_passes(plan: Sequence[Sequence[Sequence[int]]], mini_batch: int) -> list[list[int]]:
    """All forward passes of a plan in order, as indices into the whole batch."""
    return [
        [number * mini_batch + i for i in micro]
        for number, micros in enumerate(plan)
        for micro in micros
    ]


def as_mini_batches(
    batch: RolloutBatch, plan: Sequence[Sequence[Sequence[int]]], mini_batch: int
) -> list[MiniBatch]:
    """The batch as mini-batches of consecutive samples, in training order."""
    return [
        MiniBatch(
            samples=batch.select(range(number * mini_batch, (number + 1) * mini_batch)),
            micro_batches=tuple(tuple(micro) for micro in micros),
        )
        for number, micros in enumerate(plan)
    ]


def with_trained_tokens(minis: Sequence[MiniBatch], context: ParallelContext) -> list[MiniBatch]:
    """Those that have a trained token on any DP rank: there is nothing to divide a loss by else.

    A step of the optimizer on a gradient of 0 would still move weights, by decay and by momentum.
    Collective over DP; the same mini-batches on every rank.
    """
    counts = [int(mini.samples.response_mask.sum()) for mini in minis]
    everywhere = sum_over_data(torch.tensor(counts, dtype=torch.int64), context).tolist()
    return [mini for mini, count in zip(minis, everywhere, strict=True) if count]
