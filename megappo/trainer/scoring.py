"""Scores for samples, while others are generated or afterwards.

With overlap the rank whose engine answers also scores, response by response as they end, and the
scores go home to the rank that asked. Without it each rank of a replica scores the part that it
asked for. Both give the same scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megappo.config.rewards import TOTAL, RewardSection
from megappo.distributed.metrics import Tally, reduce_tally
from megappo.distributed.parallel import ParallelContext, all_gather_objects
from megappo.rewards.base import Sample
from megappo.rewards.scorer import Scorer, ScoreResult, Scoring
from megappo.rollout.worker import Route
from megappo.trainer.model_scoring import MEANS as MODEL_MEANS
from megappo.trainer.model_scoring import ModelScorer
from megappo.types import Completion, Prompt, RolloutBatch

OVERLAP = "reward/overlap"
"""Share of the responses whose score was there when the last response of their engine ended."""
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


@dataclass(kw_only=True)
class Overlap:
    """Scores what this rank's engine answers while it does; a `rollout.worker.Listener`."""

    scorer: Scorer
    num_ready: int = field(default=0, init=False)
    """scored when the last response was there"""
    _prompts: Sequence[Prompt] = field(default=(), init=False)
    _scoring: Scoring | None = field(default=None, init=False)
    _route: Route | None = field(default=None, init=False)

    def expect(self, prompts: Sequence[Prompt]) -> None:
        """Rewards are built here, if they are new."""
        self._prompts = prompts
        self._scoring = self.scorer.begin([prompt.data_source for prompt in prompts])

    def finished(self, number: int, completion: Completion) -> None:
        """Its reward starts."""
        assert self._scoring is not None, "expect comes first"
        self._scoring.put(number, sample_of(self._prompts[number], completion))

    def answered(self, route: Route) -> None:
        """Counts what was hidden behind the generation."""
        assert self._scoring is not None, "expect comes first"
        self.num_ready, self._route = self._scoring.num_done, route

    def result(self) -> tuple[ScoreResult, list[tuple[float, bool]]]:
        """What was scored here, and of what this rank asked for each score and if it failed.

        Collective over the sharing domain; waits for the slowest reward.
        """
        assert self._scoring is not None, "expect comes first"
        assert self._route is not None, "answered comes first"
        result = self._scoring.result()
        return result, self._route.home(list(zip(result.scores, result.failed, strict=True)))

    def count(self, tally: Tally, name: str) -> None:
        """Adds the hidden share to a mean."""
        tally.add(name, self.num_ready, len(self._prompts))


@dataclass(frozen=True, kw_only=True)
class BatchScorer:
    """Fills `scores`; a sample whose reward failed is counted, and not trained on."""

    scorer: Scorer
    sources: tuple[str, ...]
    """every data_source of the training files"""
    context: ParallelContext
    model: ModelScorer | None = None
    """adds a reward model's score"""

    @property
    def means(self) -> tuple[str, ...]:
        """Metrics that every rank names."""
        parts = part_metrics(self.scorer.settings, self.sources).values()
        overlap = (OVERLAP,) if self.scorer.settings.overlap else ()
        of_model = MODEL_MEANS if self.model is not None else ()
        return (*RATES, *overlap, *of_model, *(f"reward/{part}" for part in parts))

    def begin(self) -> Overlap | None:
        """Listens to the next generation, if scoring overlaps with it."""
        return Overlap(scorer=self.scorer) if self.scorer.settings.overlap else None

    def score(
        self, batch: RolloutBatch, part: range, tally: Tally, overlap: Overlap | None = None
    ) -> RolloutBatch:
        """The batch with scores. Collective over the world.

        Args:
            batch: of this rank's replica.
            part: samples that this rank asked for; it scores them now, if there is no overlap.
            tally: of this rank.
            overlap: listened to the generation of the batch.

        Raises:
            RuntimeError: on all ranks, if too many rewards failed.
        """
        if overlap is None:
            rows = slice(part.start, part.stop)
            samples = list(map(sample_of, batch.prompts[rows], batch.completions[rows]))
            result = self.scorer.score(samples)
            mine = list(zip(result.scores, result.failed, strict=True))
        else:
            result, mine = overlap.result()
            overlap.count(tally, OVERLAP)
        self._count(result, tally)
        parts = all_gather_objects(mine, self.context.model_group)
        pairs = [pair for of_part in parts for pair in of_part]
        batch = batch.with_scores(
            torch.tensor([score for score, _ in pairs], dtype=torch.float32),
            torch.tensor([failed for _, failed in pairs], dtype=torch.bool),
        )
        return batch if self.model is None else self.model.add(batch, tally)

    def _count(self, result: ScoreResult, tally: Tally) -> None:
        found = Tally()
        found.add("reward/error_rate", result.errors, len(result.scores))
        found.add("reward/timeout_rate", result.timeouts, len(result.scores))
        # Over a count of 1 in all, so that the mean is the sum over ranks; a step may score twice.
        is_first = not tally.sums.get("reward/timeouts", (0.0, 0.0))[1]
        found.add("reward/timeouts", result.timeouts, int(self.context.is_main and is_first))
        rate = reduce_tally(found, self.context)["reward/error_rate"]
        check_error_rate(rate, self.scorer.settings.max_error_rate)
        tally.merge(found)
        add_parts(tally, result, "reward/")
