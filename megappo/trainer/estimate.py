"""From scores and log-probs to advantages: KL in the reward, then the chosen estimator.

Statistics are over all data-parallel ranks, each token once; ranks of one replica hold the same
samples and so compute the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.config.learning import AlgorithmSection
from megappo.distributed.metrics import Tally
from megappo.distributed.parallel import ParallelContext, sum_over_data
from megappo.ppo.kl import AdaptiveKLController, FixedKLController, KLController
from megappo.ppo.rewards import token_rewards
from megappo.trainer.advantage_methods import METHODS, AdvantageMethod
from megappo.types import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """Token rewards and their advantages."""

    settings: AlgorithmSection
    kl_controller: KLController
    context: ParallelContext
    method: AdvantageMethod

    MEANS = ("actor/reward_kl",)

    def estimate(
        self,
        batch: RolloutBatch,
        values_after: Tensor | None,
        tally: Tally,
        *,
        kl_factor: float = 1.0,
    ) -> RolloutBatch:
        """Fills rewards, advantages and, with a critic, returns. Collective over DP.

        Args:
            batch: with scores, old_log_probs, what the method needs (values, baselines) and, where
                a KL is used, ref_log_probs.
            values_after: [B] value of the state after each sample's last token, with a critic.
            tally: gets the KL to the reference; the controller is fed with its global mean,
                unless that is not finite.
            kl_factor: times the controller's coefficient.
        """
        assert batch.scores is not None
        kl_coef = self.kl_controller.kl_coef * kl_factor
        rewards, kl = token_rewards(
            batch.scores,
            batch.response_mask,
            log_probs=batch.old_log_probs,
            ref_log_probs=batch.ref_log_probs,
            kl_coef=kl_coef if self.settings.use_kl_in_reward else 0.0,
            kl_kind=self.settings.kl_penalty,
        )
        advantages, returns = self.method(batch, rewards, values_after)
        self._steer(kl, tally)
        batch = batch.with_fields(rewards=rewards, advantages=advantages)
        return batch if returns is None else batch.with_fields(returns=returns)

    def _steer(self, kl: tuple[Tensor, Tensor], tally: Tally) -> None:
        total, count = sum_over_data(torch.stack([k.double() for k in kl]), self.context).tolist()
        tally.add("actor/reward_kl", total, count)
        # What is not finite reaches the guard, which says what is to be done about it.
        if count and math.isfinite(total):
            self.kl_controller.update(total / count, int(count))


def make_estimator(
    settings: AlgorithmSection, kl_controller: KLController, context: ParallelContext
) -> Estimator:
    """The estimator that `algorithm.adv_estimator` names."""
    return Estimator(
        settings=settings,
        kl_controller=kl_controller,
        context=context,
        method=METHODS[settings.adv_estimator](settings, context),
    )


def make_kl_controller(settings: AlgorithmSection) -> KLController:
    """What `algorithm.kl_ctrl` names."""
    if settings.kl_ctrl == "adaptive":
        return AdaptiveKLController(settings.kl_coef, settings.target_kl, settings.horizon)
    return FixedKLController(settings.kl_coef)
