"""CISPO: a policy gradient whose importance weights are clipped, so that no token drops out.

Legend: B samples, T response tokens.
"""

from __future__ import annotations

from torch import Tensor

from megappo.ppo.kl import MAX_LOG_RATIO
from megappo.ppo.losses import PerTokenLoss, per_token_loss
from megappo.ppo.masking import zero_outside


def cispo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> PerTokenLoss:
    """Clipped importance weights times the policy gradient.

    MiniMax 2025 (MiniMax-M1, arXiv 2506.13585), eq. 4 and 5: the gradient is that of
    `-sg[clip(ratio, 1 - low, 1 + high)] A log p`. Where PPO's clip takes a token's gradient away,
    here it keeps a bounded one. Deviations: the value is `-A clip(ratio)` in place of that times
    log p, with the same gradient, so that it reads as PPO's does; the log-ratio is clamped to +-20.

    Args:
        log_probs: [B, T], by the actor now; carries the gradient.
        old_log_probs: [B, T], by the actor before the update.
        advantages: [B, T].
        response_mask: [B, T] bool.
        clip_ratio_low: lower side of the clip, in [0, 1]; 1 is no lower bound, as in the paper.
        clip_ratio_high: upper side of the clip, >= 0.

    Returns:
        The loss, with the metrics of `losses.policy_loss`: `pg_clipfrac` are tokens whose weight
        was clipped on either side, `pg_clipfrac_lower` those on the lower one.
    """
    log_probs = zero_outside(log_probs, response_mask)
    old_log_probs = zero_outside(old_log_probs.detach(), response_mask)
    advantages = zero_outside(advantages.detach(), response_mask)
    log_ratio = log_probs - old_log_probs
    ratio = log_ratio.detach().clamp(min=-MAX_LOG_RATIO, max=MAX_LOG_RATIO).exp()
    weight = ratio.clamp(min=1.0 - clip_ratio_low, max=1.0 + clip_ratio_high)
    per_token = {
        "pg_clipfrac": weight != ratio,
        "pg_clipfrac_lower": weight > ratio,
        "ppo_kl": -log_ratio,
        "ratio_mean": ratio,
    }
    loss = -advantages * weight * (log_probs - log_probs.detach()).exp()
    return per_token_loss(loss, response_mask, per_token)
