"""SAPO: a soft gate on the probability ratio in the place of PPO's clip.

Legend: B samples, T response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.ppo.kl import MAX_LOG_RATIO
from megappo.ppo.losses import PerTokenLoss, per_token_loss
from megappo.ppo.masking import zero_outside


def sapo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    tau_pos: float,
    tau_neg: float,
) -> PerTokenLoss:
    """Soft adaptive policy optimisation.

    Gao 2025 (arXiv 2511.20347): `-A (4 / tau) sigmoid(tau (ratio - 1))`, with tau_pos where A > 0
    and tau_neg elsewhere. At ratio 1 its gradient is PPO's; away from it the gradient fades with
    the gate `4 s (1 - s)`, the faster the larger tau. Deviation: the log-ratio is clamped to +-20.

    Args:
        log_probs: [B, T], by the actor now; carries the gradient.
        old_log_probs: [B, T], by the actor before the update.
        advantages: [B, T].
        response_mask: [B, T] bool.
        tau_pos: > 0; the paper takes 1.
        tau_neg: > 0; the paper takes 1.05, so that tokens are pushed down more carefully.

    Returns:
        The loss, with the metrics of `losses.policy_loss`: `pg_clipfrac` are tokens whose gradient
        the gate more than halves; `pg_clipfrac_lower` is 0.
    """
    log_probs = zero_outside(log_probs, response_mask)
    old_log_probs = zero_outside(old_log_probs.detach(), response_mask)
    advantages = zero_outside(advantages.detach(), response_mask)
    log_ratio = log_probs - old_log_probs
    ratio = log_ratio.clamp(min=-MAX_LOG_RATIO, max=MAX_LOG_RATIO).exp()
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (ratio - 1.0))
    per_token = {
        "pg_clipfrac": 4.0 * gate * (1.0 - gate) < 0.5,
        "pg_clipfrac_lower": torch.zeros_like(response_mask),
        "ppo_kl": -log_ratio,
        "ratio_mean": ratio,
    }
    return per_token_loss(-advantages * (4.0 / tau) * gate, response_mask, per_token)
