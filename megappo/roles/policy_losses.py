"""The policy losses by name of `actor.policy_loss`, each bound to its settings.

Legend: b samples of a micro-batch, T response tokens. A loss sees the tokens that this rank owns;
one that needs whole responses sums over the context-parallel ranks, which all run the same
micro-batches in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from megappo.config.learning import ActorSection
from megappo.distributed.context_parallel import sum_over_context
from megappo.ppo.cispo import cispo_loss
from megappo.ppo.gspo import gspo_loss, sequence_log_ratio
from megappo.ppo.losses import PerTokenLoss, policy_loss
from megappo.ppo.sapo import sapo_loss
from megappo.registry import Registry


class PolicyLoss(Protocol):
    """What the actor minimises of a micro-batch, token by token."""

    def __call__(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> PerTokenLoss:
        """The loss of the tokens in the mask. May be collective over CP.

        Args:
            log_probs: [b, T], by the actor now; carries the gradient.
            old_log_probs: [b, T], what the ratio is taken to.
            advantages: [b, T].
            response_mask: [b, T] bool, trained tokens that this rank owns.
        """


POLICY_LOSSES: Registry[Callable[[ActorSection], PolicyLoss]] = Registry("actor.policy_loss")


@POLICY_LOSSES.register("ppo")
def _ppo(settings: ActorSection) -> PolicyLoss:
    def loss(
        log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> PerTokenLoss:
        return policy_loss(
            log_probs,
            old_log_probs,
            advantages,
            response_mask,
            clip_ratio_low=settings.clip_low,
            clip_ratio_high=settings.clip_high,
            clip_ratio_c=settings.clip_ratio_c,
        )

    return loss


@POLICY_LOSSES.register("gspo")
def _gspo(settings: ActorSection) -> PolicyLoss:
    def loss(
        log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> PerTokenLoss:
        here = torch.stack(sequence_log_ratio(log_probs, old_log_probs, response_mask))
        total, count = sum_over_context(here)
        return gspo_loss(
            log_probs,
            old_log_probs,
            advantages,
            response_mask,
            mean_log_ratio=total / count.clamp(min=1.0),
            clip_ratio_low=settings.clip_low,
            clip_ratio_high=settings.clip_high,
        )

    return loss


@POLICY_LOSSES.register("cispo")
def _cispo(settings: ActorSection) -> PolicyLoss:
    def loss(
        log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> PerTokenLoss:
        return cispo_loss(
            log_probs,
            old_log_probs,
            advantages,
            response_mask,
            clip_ratio_low=settings.clip_low,
            clip_ratio_high=settings.clip_high,
        )

    return loss


@POLICY_LOSSES.register("sapo")
def _sapo(settings: ActorSection) -> PolicyLoss:
    def loss(
        log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> PerTokenLoss:
        return sapo_loss(
            log_probs,
            old_log_probs,
            advantages,
            response_mask,
            tau_pos=settings.sapo_tau_pos,
            tau_neg=settings.sapo_tau_neg,
        )

    return loss
