"""Scores for samples: each rank of a replica scores the part that it generated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megappo.distributed.metrics import Tally, reduce_tally
from megappo.distributed.parallel import ParallelContext, all_gather_objects
from megappo.rewards.scorer import Scorer
from megappo.types import RolloutBatch


def check_error_rate(rate: float, limit: float) -> None:
    """Ends the run on every rank alike if too many rewards failed.

    Args:
        rate: failed rewards / responses, over all ranks.
        limit: `reward.max_error_rate`.

    Raises:
        RuntimeError: the rate is over the limit.
    """
    if rate > limit:
        raise RuntimeError(
            f"{rate:.1%} of the rewards failed, over reward.max_error_rate ({limit:.1%}): the "
            "policy would learn from a broken reward. Each cause is in logs/, once"
        )


@dataclass(frozen=True, kw_only=True)
class BatchScorer:
    """Fills `scores`; failed rewards are counted, never silently 0."""

    scorer: Scorer
    context: ParallelContext
    max_error_rate: float

    MEANS = ("reward/error_rate", "reward/timeout_rate")

    def score(self, batch: RolloutBatch, part: range, tally: Tally) -> RolloutBatch:
        """Scores the samples in `part` here and gathers the rest. Collective over the world.

        Raises:
            RuntimeError: on all ranks, if too many rewards failed.
        """
        prompts, completions = (
            batch.prompts[part.start : part.stop],
            batch.completions[part.start : part.stop],
        )
        result = self.scorer.score(
            [
                (p.data_source, c.text, p.ground_truth, p.extra_info)
                for p, c in zip(prompts, completions, strict=True)
            ]
        )
        found = Tally()
        found.add("reward/error_rate", result.errors, len(prompts))
        found.add("reward/timeout_rate", result.timeouts, len(prompts))
        rate = reduce_tally(found, self.context)["reward/error_rate"]
        check_error_rate(rate, self.max_error_rate)
        tally.merge(found)
        parts = all_gather_objects(result.scores, self.context.model_group)
        scores = torch.tensor(
            [s for part_scores in parts for s in part_scores], dtype=torch.float32
        )
        return batch.with_fields(scores=scores)
