"""A step's samples: prompts drawn, answered, scored, and what is added to their scores.

A `Source` brings a whole step's prompts with scored responses; finishers then add to the batch one
after another. Both are chosen when a run is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from megappo.data.prompts import PromptDataset
from megappo.data.sampler import PromptSampler, rank_share
from megappo.distributed.metrics import Tally
from megappo.distributed.parallel import ParallelContext
from megappo.rollout.worker import RolloutWorker
from megappo.trainer.group_metrics import GroupMetrics
from megappo.trainer.scoring import BatchScorer
from megappo.trainer.stopwatch import Stopwatch
from megappo.types import PromptBatch, RolloutBatch


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
    sampler: PromptSampler
    rollouts: RolloutWorker
    scorer: BatchScorer
    mini_batch_prompts: int
    """over all DP ranks"""

    @property
    def means(self) -> Sequence[str]:
        """See `Source`."""
        return self.scorer.means

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
        with scope.watch.phase("generate"):
            overlap = self.scorer.begin()
            batch = self.rollouts.generate(prompts, step=scope.number, salt=salt, listener=overlap)
        scope.may_stop()
        with scope.watch.phase("score"):
            part = self.rollouts.my_part(len(batch))
            batch = self.scorer.score(batch, part, scope.tally, overlap)
        scope.may_stop()
        return batch


@dataclass(frozen=True, kw_only=True)
class GreedyFinisher:
    """Fills `baselines`: each prompt is answered greedily once, and that answer scored (ReMax)."""

    rollouts: RolloutWorker
    scorer: BatchScorer
    shape: Finisher | None
    """what is added to the scores of samples, for those of greedy answers too"""

    means: Sequence[str] = ("critic/baselines/mean",)

    def finish(self, batch: RolloutBatch, scope: StepScope) -> RolloutBatch:
        """See `Finisher`."""
        n = self.rollouts.n
        with scope.watch.phase("generate"):
            overlap = self.scorer.begin()
            answers = self.rollouts.greedy(batch.prompts[::n], step=scope.number, listener=overlap)
        scope.may_stop()
        unseen = Tally()  # the figures of a step are those of its samples
        with scope.watch.phase("score"):
            part = self.rollouts.my_part(len(answers))
            answers = self.scorer.score(answers, part, unseen, overlap)
        if self.shape is not None:
            answers = self.shape.finish(answers, replace(scope, tally=unseen))
        assert answers.scores is not None
        if self.rollouts.context.reports_samples:
            scope.tally.add(self.means[0], answers.scores.double().sum().item(), len(answers))
        return batch.with_fields(baselines=answers.scores.repeat_interleave(n))


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
