"""Scores for samples: each rank of a replica scores the part that it generated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megappo.distributed.metrics import Tally
from megappo.distributed.parallel import ParallelContext, all_gather_objects
from megappo.rewards.scorer import Scorer
from megappo.types import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class BatchScorer:
    """Fills `scores`; failed rewards are counted, never silently 0."""

    scorer: Scorer
    context: ParallelContext

    MEANS = ("reward/error_rate", "reward/timeout_rate")

    def score(self, batch: RolloutBatch, part: range, tally: Tally) -> RolloutBatch:
        """Scores the samples in `part` here and gathers the rest. Collective over the replica.

        Raises:
            RuntimeError: more rewards failed than `reward.max_error_rate` allows.
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
        tally.add("reward/error_rate", result.errors, len(prompts))
        tally.add("reward/timeout_rate", result.timeouts, len(prompts))
        parts = all_gather_objects(result.scores, self.context.model_group)
        scores = torch.tensor(
            [s for part_scores in parts for s in part_scores], dtype=torch.float32
        )
        return batch.with_fields(scores=scores)
