"""A step's samples: prompts drawn, answered, scored, and what is added to their scores.

A `Source` brings a whole step's prompts with scored responses; finishers then add to the batch one
after another. Both are chosen when a run is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from megappo.data.curriculum import CurriculumSampler
from megappo.data.prompts import PromptDataset
from megappo.data.sampler import Sampler, rank_share
from megappo.distributed.exchange import gather_equal
from megappo.distributed.metrics import Tally
from megappo.distributed.parallel import ParallelContext
from megappo.rollout.worker import RolloutWorker
from megappo.trainer.group_metrics import GroupMetrics
from megappo.trainer.scoring import BatchScorer
from megappo.trainer.stopwatch import Stopwatch
from megappo.types import PromptBatch, RolloutBatch

BASELINE = "critic/baselines/mean"
"""Mean score of greedy answers."""
OF_BASELINES = {
    "reward/baseline_error_rate": "reward/error_rate",
    "reward/baseline_timeout_rate": "reward/timeout_rate",
}
"""Metric of greedy answers -> the scorer's name for that of samples."""


@dataclass(frozen=True, kw_only=True)
class StepScope:
    """One step, as those that collect its samples see it."""

    number: int
    salt: int
    """of the sampling seeds, see `sampling.sample_seed`"""
    watch: Stopwatch
    tally: Tally
    may_stop: Callable[[], None]
    """called where the step can be given up; see `PPOTrainer.step`"""


class Source(Protocol):
    """Where a step's samples come from."""

    @property
    def means(self) -> Sequence[str]:
        """Metrics that `collect` adds to."""

    def collect(self, scope: StepScope) -> RolloutBatch:
        """This rank's samples with scores, siblings together. Collective over the world."""


class Finisher(Protocol):
    """Adds to scored samples."""

    @property
    def means(self) -> Sequence[str]:
        """Metrics that `finish` adds to."""

    def finish(self, batch: RolloutBatch, scope: StepScope) -> RolloutBatch:
        """A batch of the same samples. Collective over the world."""


@dataclass(frozen=True, kw_only=True)
class DrawnSource:
    """The next prompts of the sampler, all of them."""

    context: ParallelContext
    dataset: PromptDataset
    sampler: Sampler
    rollouts: RolloutWorker
    scorer: BatchScorer
    mini_batch_prompts: int
    """over all DP ranks"""
    sources: Sequence[str] = ()
    """every data_source that may occur; shares are counted where there are several"""
    curriculum: CurriculumSampler | None = None
    """the sampler, if it is to know of scores"""

    @property
    def means(self) -> Sequence[str]:
        """See `Source`."""
        return (*self.scorer.means, *map(share_of, self._counted))

    @property
    def _counted(self) -> Sequence[str]:
        return self.sources if len(self.sources) > 1 else ()

    def collect(self, scope: StepScope) -> RolloutBatch:
        """See `Source`."""
        epoch, rows = self.sampler.next_batch()
        return self.answer(epoch, rows, scope, salt=scope.salt)

    def answer(
        self, epoch: int, rows: Sequence[int], scope: StepScope, *, salt: int
    ) -> RolloutBatch:
        """Scored responses to this rank's share of the rows of a whole batch.

        Collective over the world.
        """
        mine = rank_share(
            rows,
            mini_batch_size=self.mini_batch_prompts,
            dp_rank=self.context.dp_rank,
            dp_size=self.context.dp,
        )
        prompts = PromptBatch(epoch=epoch, prompts=tuple(self.dataset.rows(mine)))
        self._count_sources(prompts, scope.tally)
        with scope.watch.phase("generate"):
            overlap = self.scorer.begin()
            batch = self.rollouts.generate(prompts, step=scope.number, salt=salt, listener=overlap)
        scope.may_stop()
        with scope.watch.phase("score"):
            part = self.rollouts.my_part(len(batch))
            batch = self.scorer.score(batch, part, scope.tally, overlap)
        scope.may_stop()
        if self.curriculum is not None:
            self._tell(self.curriculum, rows, batch)
        return batch

    def _count_sources(self, prompts: PromptBatch, tally: Tally) -> None:
        if not self.context.reports_samples:
            return
        for prompt in prompts.prompts:
            for source in self._counted:
                tally.add(share_of(source), prompt.data_source == source, 1)

    def _tell(
        self, curriculum: CurriculumSampler, rows: Sequence[int], batch: RolloutBatch
    ) -> None:
        """Every rank's sampler learns the mean score of each row of a whole batch.

        NaN where every reward failed; the sampler keeps what it knew. Collective over DP.
        """
        assert batch.scores is not None
        counted = torch.where(batch.is_scored, batch.scores.double(), torch.nan)
        means = counted.reshape(-1, self.rollouts.n).nanmean(dim=-1)
        everyone = gather_equal(means, self.context.data_group)
        for dp_rank, scores in enumerate(everyone.tolist()):
            share = rank_share(
                rows,
                mini_batch_size=self.mini_batch_prompts,
                dp_rank=dp_rank,
                dp_size=self.context.dp,
            )
            curriculum.observe(share, scores)


@dataclass(frozen=True, kw_only=True)
class GreedyFinisher:
    """Fills `baselines`: each prompt is answered greedily once, and that answer scored (ReMax)."""

    rollouts: RolloutWorker
    scorer: BatchScorer
    shape: Finisher | None
    """what is added to the scores of samples, for those of greedy answers too"""

    means: Sequence[str] = (BASELINE, *OF_BASELINES)

    def finish(self, batch: RolloutBatch, scope: StepScope) -> RolloutBatch:
        """See `Finisher`."""
        n = self.rollouts.n
        with scope.watch.phase("generate"):
            overlap = self.scorer.begin()
            answers = self.rollouts.greedy(batch.prompts[::n], step=scope.number, listener=overlap)
        scope.may_stop()
        # The figures of a step are those of its samples; these have names of their own.
        unseen = Tally()
        with scope.watch.phase("score"):
            part = self.rollouts.my_part(len(answers))
            answers = self.scorer.score(answers, part, unseen, overlap)
        for name, of_samples in OF_BASELINES.items():
            scope.tally.add(name, *unseen.sums[of_samples])
        if self.shape is not None:
            answers = self.shape.finish(answers, replace(scope, tally=unseen))
        assert answers.scores is not None
        if self.rollouts.context.reports_samples:
            scored = answers.scores[answers.is_scored].double()
            scope.tally.add(BASELINE, scored.sum().item(), len(scored))
        compared = answers.is_scored.repeat_interleave(n)  # the others have no baseline
        return batch.with_fields(
            baselines=answers.scores.repeat_interleave(n),
            response_mask=batch.response_mask & compared[:, None],
        )


@dataclass(frozen=True, kw_only=True)
class Collector:
    """A source, then the finishers, then a look at the groups."""

    source: Source
    scorer: BatchScorer
    """what the source scores with"""
    finishers: Sequence[Finisher] = ()
    groups: GroupMetrics = field(default_factory=GroupMetrics)

    @property
    def means(self) -> list[str]:
        """Metrics that `collect` adds to."""
        of_parts = (self.source.means, *(f.means for f in self.finishers), self.groups.means)
        return [name for means in of_parts for name in means]

    def collect(self, scope: StepScope) -> RolloutBatch:
        """This rank's samples of the step, scored. Collective over the world."""
        batch = self.source.collect(scope)
        for finisher in self.finishers:
            batch = finisher.finish(batch, scope)
        self.groups.add(batch, scope.tally)
        return batch


def share_of(source: str) -> str:
    """Share of a data source among the prompts that a step drew."""
    return f"sampling/share/{source}"
