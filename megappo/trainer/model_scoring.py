"""Adds the reward model's score to that of the rules, for training and for validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megappo.config.reward_model import RewardModelSection
from megappo.distributed.metrics import Tally
from megappo.distributed.parallel import ParallelContext, all_gather_objects
from megappo.roles.reward_model import RewardModel
from megappo.trainer.micro_batches import MicroBatchPlanner
from megappo.types import Completion, Prompt, RolloutBatch, collate

MEANS = ("reward/model/mean", "reward/rules/mean")
VAL_MEAN = "val/reward_model/mean"


@dataclass(frozen=True, kw_only=True)
class ModelScorer:
    """A reward model with its share of the score."""

    model: RewardModel
    planner: MicroBatchPlanner
    settings: RewardModelSection
    context: ParallelContext

    def add(self, batch: RolloutBatch, tally: Tally) -> RolloutBatch:
        """Scores = weight * model + rule_weight * rules. Collective over replica and DP.

        Args:
            batch: all samples of the replica, with the rules' scores.
            tally: gets the mean of either part.
        """
        assert batch.scores is not None
        found = self._score(batch)
        if self.context.reports_samples:
            for name, values in zip(MEANS, (found, batch.scores[batch.is_scored]), strict=True):
                tally.add(name, values.double().sum().item(), len(values))
        total = self.settings.weight * found + self.settings.rule_weight * batch.scores
        return batch.with_fields(scores=total)

    def validate(
        self, prompts: Sequence[Prompt], answers: Sequence[Completion], tally: Tally
    ) -> None:
        """Adds the mean score of this rank's validation samples. Collective over replica and DP.

        The ranks of a replica have samples of their own, and score all of them together.

        Args:
            prompts: one an answer.
            answers: on this rank, perhaps none.
            tally: gets `VAL_MEAN`.
        """
        mine = list(zip(prompts, answers, strict=True))
        together = all_gather_objects(mine, self.context.model_group)
        pairs = [pair for part in together for pair in part]
        scores = self._score(collate([p for p, _ in pairs], [a for _, a in pairs]))
        if self.context.reports_samples:
            tally.add(VAL_MEAN, scores.double().sum().item(), len(pairs))

    def _score(self, batch: RolloutBatch) -> Tensor:
        return self.model.score(batch, self.planner.plan_any(batch.total_lengths))
