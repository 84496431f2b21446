"""Scores for samples: each rank of a replica scores the part that it generated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megappo.config.rewards import TOTAL, RewardSection
from megappo.distributed.metrics import Tally, reduce_tally
from megappo.distributed.parallel import ParallelContext, all_gather_objects
from megappo.rewards.base import Sample
from megappo.rewards.scorer import Scorer, ScoreResult
from megappo.types import Completion, Prompt, RolloutBatch

RATES = ("reward/error_rate", "reward/timeout_rate", "reward/timeouts")


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


def sample_of(prompt: Prompt, completion: Completion) -> Sample:
    """What a reward is given, with the facts about the response that its text does not show."""
    return Sample(
        data_source=prompt.data_source,
        response=completion.text,
        ground_truth=prompt.ground_truth,
        extra_info={
            **prompt.extra_info,
            "response_tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
        },
    )


def part_metrics(settings: RewardSection, sources: tuple[str, ...]) -> dict[tuple[str, str], str]:
    """(data_source, label of a term or `score`) -> its metric, without what stands before it."""
    labels = {
        source: [*(part.label for part in settings.parts(source)), TOTAL] for source in sources
    }
    return {(s, label): f"{s}/{label}" for s, of_source in labels.items() for label in of_source}


def add_parts(tally: Tally, result: ScoreResult, prefix: str) -> None:
    """Means of each data_source's terms, without weight and failures, and of their sums."""
    for (source, label), (total, count) in result.per_part.items():
        tally.add(f"{prefix}{source}/{label}", total, count)
    for source, (total, count) in result.per_source.items():
        tally.add(f"{prefix}{source}/{TOTAL}", total, count)


@dataclass(frozen=True, kw_only=True)
class BatchScorer:
    """Fills `scores`; failed rewards are counted, never silently 0."""

    scorer: Scorer
    sources: tuple[str, ...]
    """every data_source of the training files"""
    context: ParallelContext

    @property
    def means(self) -> tuple[str, ...]:
        """Metrics that every rank names."""
        parts = part_metrics(self.scorer.settings, self.sources).values()
        return (*RATES, *(f"reward/{part}" for part in parts))

    def score(self, batch: RolloutBatch, part: range, tally: Tally) -> RolloutBatch:
        """Scores the samples in `part` here and gathers the rest. Collective over the world.

        Raises:
            RuntimeError: on all ranks, if too many rewards failed.
        """
        prompts, completions = (
            batch.prompts[part.start : part.stop],
            batch.completions[part.start : part.stop],
        )
        result = self.scorer.score(list(map(sample_of, prompts, completions)))
        self._count(result, tally)
        parts = all_gather_objects(result.scores, self.context.model_group)
        scores = torch.tensor(
            [s for part_scores in parts for s in part_scores], dtype=torch.float32
        )
        return batch.with_fields(scores=scores)

    def _count(self, result: ScoreResult, tally: Tally) -> None:
        found = Tally()
        found.add("reward/error_rate", result.errors, len(result.scores))
        found.add("reward/timeout_rate", result.timeouts, len(result.scores))
        # Over a count of 1 in all, so that the mean is the sum over ranks.
        found.add("reward/timeouts", result.timeouts, int(self.context.is_main))
        rate = reduce_tally(found, self.context)["reward/error_rate"]
        check_error_rate(rate, self.scorer.settings.max_error_rate)
        tally.merge(found)
        add_parts(tally, result, "reward/")
