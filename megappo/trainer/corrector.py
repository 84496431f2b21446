"""Applies `algorithm.rollout_is` and `rollout_rs` to a step's samples; the maths is in `ppo`.

It runs after old log-probs are known and before advantages: a rejected token is then like a tool's
token to everything that follows. Left out: it moves no sample and changes no log-prob.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megappo.distributed.metrics import Tally
from megappo.ppo.corrections import importance_weights, kept_tokens, log_ratio
from megappo.types import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class Correction:
    """One way to correct: which level, and from where on."""

    level: str
    """`token` or `sequence`"""
    threshold: float


@dataclass(frozen=True, kw_only=True)
class Corrector:
    """Weighs and rejects what the engine drew with another probability than the trainer's."""

    weigh: Correction | None
    reject: Correction | None

    @property
    def means(self) -> Sequence[str]:
        """Names that `measure` adds to."""
        of_weights = ["rollout/is_weight_mean", "rollout/is_truncated_share"] if self.weigh else []
        return [*of_weights, *(["rollout/rs_rejected_share"] if self.reject else [])]

    def correct(self, batch: RolloutBatch) -> RolloutBatch:
        """Fills `rollout_is_weights` and narrows `response_mask`, each where it is asked for.

        Args:
            batch: with old_log_probs.
        """
        assert batch.old_log_probs is not None
        mask = batch.response_mask
        d = log_ratio(batch.old_log_probs, batch.rollout_log_probs, mask)
        if self.weigh is not None:
            weights = importance_weights(
                d, mask, level=self.weigh.level, threshold=self.weigh.threshold
            )
            batch = batch.with_fields(rollout_is_weights=weights)
        if self.reject is not None:
            kept = kept_tokens(d, mask, level=self.reject.level, threshold=self.reject.threshold)
            batch = batch.with_fields(response_mask=kept)
        return batch

    def measure(self, tally: Tally, sampled: RolloutBatch, corrected: RolloutBatch) -> None:
        """Adds what `correct` did to one rank's samples, over all tokens that were sampled.

        `rollout/is_weight_mean` is near 1 where little is cut off, `is_truncated_share` are tokens
        at the threshold, `rs_rejected_share` tokens left out. Sums over ranks.
        """
        mask = sampled.response_mask
        count = int(mask.sum())
        if self.weigh is not None:
            assert corrected.rollout_is_weights is not None
            weights = corrected.rollout_is_weights[mask]
            cut = (weights >= torch.tensor(self.weigh.threshold)).sum().item()
            tally.add("rollout/is_weight_mean", weights.double().sum().item(), count)
            tally.add("rollout/is_truncated_share", cut, count)
        if self.reject is not None:
            rejected = count - int(corrected.response_mask.sum())
            tally.add("rollout/rs_rejected_share", rejected, count)
