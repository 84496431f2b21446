"""From scores, log-probs and values to advantages: KL in the reward, GAE, whitening.

Statistics are over all data-parallel ranks, each token once; ranks of one replica hold the same
samples and so compute the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.config.learning import AlgorithmSection
from megappo.distributed.metrics import Tally
from megappo.distributed.parallel import ParallelContext, sum_over_data
from megappo.ppo.advantages import compute_gae, whiten
from megappo.ppo.kl import KLController
from megappo.ppo.masking import local_sq_dev, local_sum_count
from megappo.ppo.rewards import token_rewards
from megappo.types import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """Generalised advantage estimation over token rewards."""

    settings: AlgorithmSection
    kl_controller: KLController
    context: ParallelContext

    MEANS = ("actor/reward_kl",)

    def estimate(
        self,
        batch: RolloutBatch,
        values_after: Tensor,
        tally: Tally,
        *,
        kl_factor: float = 1.0,
    ) -> RolloutBatch:
        """Fills rewards, advantages and returns. Collective over DP.

        Args:
            batch: with scores, old_log_probs, values and, where a KL is used, ref_log_probs.
            values_after: [B] value of the state after each sample's last token.
            tally: gets the KL to the reference; the controller is fed with its global mean.
            kl_factor: times the controller's coefficient.
        """
        assert batch.scores is not None
        assert batch.values is not None
        kl_coef = self.kl_controller.kl_coef * kl_factor
        rewards, kl = token_rewards(
            batch.scores,
            batch.response_mask,
            log_probs=batch.old_log_probs,
            ref_log_probs=batch.ref_log_probs,
            kl_coef=kl_coef if self.settings.use_kl_in_reward else 0.0,
            kl_kind=self.settings.kl_penalty,
        )
        advantages, returns = compute_gae(
            rewards,
            batch.values,
            batch.response_mask,
            gamma=self.settings.gamma,
            lam=self.settings.lam,
            bootstrap_values=self._bootstrap(batch, values_after),
        )
        if self.settings.whiten_advantages:
            advantages = whiten(
                advantages,
                batch.response_mask,
                moments=self._moments(advantages, batch.response_mask),
            )
        self._steer(kl, tally)
        return batch.with_fields(rewards=rewards, advantages=advantages, returns=returns)

    def _bootstrap(self, batch: RolloutBatch, values_after: Tensor) -> Tensor | None:
        if not self.settings.bootstrap_truncated:
            return None
        cut = torch.tensor([c.finish_reason == "length" for c in batch.completions])
        return torch.where(cut, values_after, 0.0)

    def _moments(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and population variance over all DP ranks, in two passes. Collective over DP."""
        total, count = local_sum_count(x, mask)
        total, count = sum_over_data(torch.stack([total.double(), count.double()]), self.context)
        count = count.clamp(min=1.0)
        mean = total / count
        deviation = local_sq_dev(x, mask, mean).double()
        return mean, sum_over_data(deviation, self.context) / count

    def _steer(self, kl: tuple[Tensor, Tensor], tally: Tally) -> None:
        total, count = sum_over_data(torch.stack([k.double() for k in kl]), self.context).tolist()
        tally.add("actor/reward_kl", total, count)
        if count:
            self.kl_controller.update(total / count, int(count))
