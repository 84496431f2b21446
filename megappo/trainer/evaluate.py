"""Validation: every row of the validation files once, shared out over all ranks.

Left out: anything that touches the training state. Sampling has settings of its own
(`rollout.val`), greedy by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megappo.config.reward_model import RewardModelSection
from megappo.data.prompts import PromptDataset
from megappo.distributed.metrics import Tally, reduce_tally
from megappo.distributed.parallel import ParallelContext
from megappo.rewards.scorer import Scorer
from megappo.rollout.sampling import SamplingSettings
from megappo.rollout.worker import RolloutWorker
from megappo.trainer.model_scoring import VAL_MEAN, ModelScorer
from megappo.trainer.scoring import Overlap, add_parts, check_error_rate, part_metrics, sample_of
from megappo.types import Prompt

ROWS_AT_ONCE = 1024
_RULE_MEAN = "val/score/mean"
_FAILURES = ("val/reward_error", "val/reward_timeout_rate")


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Scores the current policy, as the engines hold it, on the validation rows."""

    dataset: PromptDataset
    sources: tuple[str, ...]
    sampling: SamplingSettings
    n: int
    scorer: Scorer
    context: ParallelContext
    model: ModelScorer | None = None

    def run(self, rollouts: RolloutWorker) -> Mapping[str, float]:
        """`val/score/mean`, the same by data source and reward, lengths, rows.

        Collective over the world.
        """
        tally = Tally()
        means = [_RULE_MEAN, "val/response_length/mean", *_FAILURES]
        parts = part_metrics(self.scorer.settings, self.sources).values()
        tally.declare(means + [_by_source(s) for s in self.sources])
        tally.declare(f"val/reward/{part}" for part in parts)
        tally.declare([VAL_MEAN] if self.model is not None else [])
        context = self.context
        for rows in blocks(len(self.dataset), rank=context.rank, world_size=context.world_size):
            prompts = self.dataset.rows(rows)
            self._score(prompts, rollouts, tally)
        reduced = dict(reduce_tally(tally, self.context))
        check_error_rate(reduced["val/reward_error"], self.scorer.settings.max_error_rate)
        reduced["val/rows"] = float(len(self.dataset))
        return reduced

    def _score(self, prompts: list[Prompt], rollouts: RolloutWorker, tally: Tally) -> None:
        """Collective over the world."""
        asked = [p for p in prompts for _ in range(self.n)]
        overlap = Overlap(scorer=self.scorer) if self.scorer.settings.overlap else None
        answers = rollouts.answer(prompts, self.sampling, self.n, listener=overlap)
        if overlap is None:
            result = self.scorer.score(list(map(sample_of, asked, answers)))
            found = list(zip(result.scores, result.failed, strict=True))
        else:
            result, found = overlap.result()
        for prompt, answer, (score, failed) in zip(asked, answers, found, strict=True):
            if not failed:
                tally.add(_RULE_MEAN, score, 1)
                tally.add(_by_source(prompt.data_source), score, 1)
            tally.add("val/response_length/mean", len(answer.token_ids), 1)
        for name, count in zip(_FAILURES, (result.errors, result.timeouts), strict=True):
            tally.add(name, count, len(result.scores))
        add_parts(tally, result, "val/reward/")
        if self.model is not None:
            self.model.validate(asked, answers, tally)


def val_score(metrics: Mapping[str, float], settings: RewardModelSection) -> float | None:
    """What `checkpoint.keep_best` keeps the highest of: the mean of the score that is trained on.

    Args:
        metrics: of a step, with those of its validation if there was one.
        settings: of the reward model; without a path the rules' score is all there is.
    """
    rules = metrics.get(_RULE_MEAN)
    if rules is None or not settings.path:
        return rules
    return settings.weight * metrics[VAL_MEAN] + settings.rule_weight * rules


def blocks(num_rows: int, *, rank: int, world_size: int) -> list[range]:
    """This rank's rows, at most `ROWS_AT_ONCE` a block.

    As many blocks on every rank, the last perhaps empty: ranks that share an engine ask it equally
    often.
    """
    rows = range(rank, num_rows, world_size)
    most = -(-num_rows // world_size)
    return [rows[start : start + ROWS_AT_ONCE] for start in range(0, most, ROWS_AT_ONCE)]


def _by_source(source: str) -> str:
    return f"val/{source}/score/mean"
