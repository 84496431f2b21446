"""What is done about long answers: a penalty near the limit, no training on those that are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megappo.ppo.rewards import overlong_penalty
from megappo.trainer.collect import StepScope
from megappo.types import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class OverlongFinisher:
    """Lowers the scores of responses that near the length limit; see `overlong_penalty`."""

    max_length: int
    buffer: int
    factor: float
    reports: bool
    """True on exactly one rank of each replica"""

    means: Sequence[str] = ("reward/overlong_penalty", "reward/overlong_share")

    def finish(self, batch: RolloutBatch, scope: StepScope) -> RolloutBatch:
        """See `collect.Finisher`. Nothing here communicates."""
        assert batch.scores is not None
        penalty = overlong_penalty(
            torch.tensor(batch.response_lengths, dtype=torch.float32),
            max_length=self.max_length,
            buffer=self.buffer,
            factor=self.factor,
        )
        if self.reports:
            scope.tally.add(self.means[0], penalty.double().sum().item(), len(batch))
            scope.tally.add(self.means[1], (penalty < 0).sum().item(), len(batch))
        return batch.with_fields(scores=batch.scores + penalty)


@dataclass(frozen=True, kw_only=True)
class MaskCutFinisher:
    """Leaves no trained token in responses that were cut at their length limit.

    Yu 2025 (DAPO, arXiv 2503.14476, section 3.4), overlong filtering: whether such a response would
    have been right is not known. It counts in no loss, no denominator and no group.
    """

    means: Sequence[str] = ()

    def finish(self, batch: RolloutBatch, scope: StepScope) -> RolloutBatch:
        """See `collect.Finisher`. Nothing here communicates."""
        whole = torch.tensor([c.finish_reason != "length" for c in batch.completions])
        return batch.with_fields(response_mask=batch.response_mask & whole[:, None])
