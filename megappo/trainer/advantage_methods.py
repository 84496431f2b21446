"""From token rewards to advantages, one small object an `algorithm.adv_estimator`.

Legend: B samples on this rank, T response tokens, D data-parallel ranks. Every method works on
whole samples; what it needs of other ranks it reduces or gathers over DP, so that the result is
that of one rank with all samples. Ranks of one replica hold the same samples and compute the same.
A sample without a trained token (cut off and masked, rejected, empty) counts nowhere.

With `seq-mean-token-sum` and a policy that has not moved yet, the expected gradient of the policy
loss is that of the expected reward for gae (lambda and gamma 1), rloo, remax and unwhitened
reinforce_pp; (n - 1) / n of it for dr_grpo, whose baseline holds the sample itself; and another one
for grpo, whose division by the group's deviation weighs prompts by how mixed their scores are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megappo.config.learning import AlgorithmSection
from megappo.distributed.exchange import gather_equal
from megappo.distributed.parallel import ParallelContext, sum_over_data
from megappo.ppo.advantages import compute_gae, group_advantages, whiten
from megappo.ppo.masking import local_sq_dev, local_sum_count
from megappo.ppo.returns import outcomes, returns_to_go, spread
from megappo.registry import Registry
from megappo.types import RolloutBatch


class AdvantageMethod(Protocol):
    """How one estimator makes advantages. Collective over DP."""

    def __call__(
        self, batch: RolloutBatch, rewards: Tensor, values_after: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Advantages and, for a critic, its targets: [B, T] float32 each, 0 where masked.

        Args:
            batch: with what the method needs (values, baselines).
            rewards: [B, T], the score on the last trained token and KL where it is in the reward.
            values_after: [B] value of the state after each sample's last token, with a critic.
        """


Factory = Callable[[AlgorithmSection, ParallelContext], AdvantageMethod]
METHODS: Registry[Factory] = Registry("algorithm.adv_estimator")
Whiten = Callable[[Tensor, Tensor], Tensor]
"""(x, mask) -> x of mean 0 and variance 1 over the mask and all DP ranks. Collective over DP."""


@dataclass(frozen=True, kw_only=True)
class Gae:
    """Generalised advantage estimation with a critic (Schulman 2016, arXiv 1506.02438)."""

    gamma: float
    lam: float
    bootstrap_truncated: bool
    whiten: Whiten

    def __call__(
        self, batch: RolloutBatch, rewards: Tensor, values_after: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `AdvantageMethod`."""
        assert batch.values is not None
        assert values_after is not None
        advantages, returns = compute_gae(
            rewards,
            batch.values,
            batch.response_mask,
            gamma=self.gamma,
            lam=self.lam,
            bootstrap_values=self._bootstrap(batch, values_after),
        )
        return self.whiten(advantages, batch.response_mask), returns

    def _bootstrap(self, batch: RolloutBatch, values_after: Tensor) -> Tensor | None:
        if not self.bootstrap_truncated:
            return None
        cut = torch.tensor([c.finish_reason == "length" for c in batch.completions])
        return torch.where(cut, values_after, 0.0)


@dataclass(frozen=True, kw_only=True)
class Siblings:
    """A response against the others to its prompt, wherever those are (`group_advantages`).

    `reinforce_pp_baseline` (Hu 2025, arXiv 2501.03262) is the score less its group's mean, whitened
    over all responses: each counts once, however long it is.
    """

    kind: str
    context: ParallelContext
    whiten: Whiten

    def __call__(
        self, batch: RolloutBatch, rewards: Tensor, values_after: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `AdvantageMethod`."""
        mask = batch.response_mask
        counted = mask.any(dim=-1)
        rows = torch.tensor([p.row for p in batch.prompts], dtype=torch.float64)
        mine = torch.stack([outcomes(rewards, mask).double(), rows, counted.double()])
        everyone = gather_equal(mine, self.context.data_group)  # [D, 3, B]
        found = group_advantages(
            everyone[:, 0].flatten(),
            everyone[:, 1].flatten().long(),
            kind=self.kind,
            counted=everyone[:, 2].flatten().bool(),
        )
        advantages = found.reshape(len(everyone), -1)[self.context.dp_rank]
        whitened = self.whiten(advantages[:, None], counted[:, None])[:, 0]
        return spread(whitened, mask), None


@dataclass(frozen=True, kw_only=True)
class ReturnsToGo:
    """REINFORCE++ (Hu 2025, arXiv 2501.03262): discounted returns, whitened over all tokens."""

    gamma: float
    whiten: Whiten

    def __call__(
        self, batch: RolloutBatch, rewards: Tensor, values_after: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `AdvantageMethod`."""
        returns = returns_to_go(rewards, batch.response_mask, gamma=self.gamma)
        return self.whiten(returns, batch.response_mask), None


class GreedyBaseline:
    """ReMax (Li 2023, arXiv 2310.10505, eq. 5): the outcome less that of the greedy response.

    The greedy response does not depend on the sampled one, so the baseline costs no bias. KL in the
    reward is the sample's own: the greedy response's is not subtracted.
    """

    def __call__(
        self, batch: RolloutBatch, rewards: Tensor, values_after: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `AdvantageMethod`."""
        assert batch.baselines is not None
        mask = batch.response_mask
        return spread(outcomes(rewards, mask) - batch.baselines, mask), None


@METHODS.register("gae")
def _gae(settings: AlgorithmSection, context: ParallelContext) -> AdvantageMethod:
    return Gae(
        gamma=settings.gamma,
        lam=settings.lam,
        bootstrap_truncated=settings.bootstrap_truncated,
        whiten=_whiten(settings, context),
    )


def _siblings(kind: str) -> Factory:
    def make(settings: AlgorithmSection, context: ParallelContext) -> AdvantageMethod:
        return Siblings(kind=kind, context=context, whiten=_whiten(settings, context))

    return make


METHODS.register("grpo")(_siblings("grpo"))
METHODS.register("dr_grpo")(_siblings("dr_grpo"))
METHODS.register("rloo")(_siblings("rloo"))
METHODS.register("reinforce_pp_baseline")(_siblings("dr_grpo"))


@METHODS.register("reinforce_pp")
def _reinforce_pp(settings: AlgorithmSection, context: ParallelContext) -> AdvantageMethod:
    return ReturnsToGo(gamma=settings.gamma, whiten=_whiten(settings, context))


@METHODS.register("remax")
def _remax(settings: AlgorithmSection, context: ParallelContext) -> AdvantageMethod:
    return GreedyBaseline()


def _whiten(settings: AlgorithmSection, context: ParallelContext) -> Whiten:
    def by_all_ranks(x: Tensor, mask: Tensor) -> Tensor:
        return whiten(x, mask, moments=global_moments(x, mask, context))

    return by_all_ranks if settings.whitens else lambda x, mask: x


def global_moments(x: Tensor, mask: Tensor, context: ParallelContext) -> tuple[Tensor, Tensor]:
    """Mean and population variance over all DP ranks, in two passes. Collective over DP."""
    total, count = local_sum_count(x, mask)
    total, count = sum_over_data(torch.stack([total.double(), count.double()]), context)
    count = count.clamp(min=1.0)
    mean = total / count
    deviation = local_sq_dev(x, mask, mean).double()
    return mean, sum_over_data(deviation, context) / count
