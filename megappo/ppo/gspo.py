"""GSPO: the probability ratio of a whole response instead of each token's.

Legend: B samples, T response tokens. Left out: the sum over ranks that hold parts of a response.
The caller sums `sequence_log_ratio` over context-parallel ranks and hands the mean in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.ppo.kl import MAX_LOG_RATIO
from megappo.ppo.losses import PerTokenLoss, per_token_loss
from megappo.ppo.masking import zero_outside


def sequence_log_ratio(
    log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum of log-ratios of each sample's tokens here, and how many those are; [B] each, detached.

    Args:
        log_probs: [B, T], by the actor now.
        old_log_probs: [B, T], by the actor before the update.
        response_mask: [B, T] bool, trained tokens on this rank.
    """
    log_ratio = zero_outside((log_probs - old_log_probs).detach(), response_mask)
    return log_ratio.sum(dim=-1), response_mask.sum(dim=-1).float()


def gspo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    mean_log_ratio: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> PerTokenLoss:
    """Group sequence policy optimisation, token by token.

    Zheng 2025 (arXiv 2507.18071), eq. 5 to 7: `s = exp(mean log-ratio of the response)`, clipped as
    in PPO. It is computed in the paper's form of eq. 13 and 14 (GSPO-token), each token's ratio
    being `sg[s] p_t / sg[p_t]`: its value is s, its gradient that of s with the mean over tokens
    left to the aggregation. So with `seq-mean-token-mean` and one advantage a response, value and
    gradient are those of GSPO; an advantage that differs by token is allowed. Deviation: the mean
    log-ratio is clamped to +-20.

    Args:
        log_probs: [B, T], by the actor now; carries the gradient.
        old_log_probs: [B, T], by the actor before the update.
        advantages: [B, T].
        response_mask: [B, T] bool, trained tokens on this rank.
        mean_log_ratio: [B], over all tokens of each *whole* sample, no gradient.
        clip_ratio_low: lower side of the clip, in [0, 1]; the paper takes 3e-4.
        clip_ratio_high: upper side of the clip, >= 0; the paper takes 4e-4.

    Returns:
        The loss, with the metrics of `losses.policy_loss`; `pg_clipfrac_lower` is 0, as there is no
        dual clip.
    """
    log_probs = zero_outside(log_probs, response_mask)
    old_log_probs = zero_outside(old_log_probs.detach(), response_mask)
    advantages = zero_outside(advantages.detach(), response_mask)
    limited = mean_log_ratio.detach().clamp(min=-MAX_LOG_RATIO, max=MAX_LOG_RATIO)
    ratio = limited.exp().unsqueeze(-1) * (log_probs - log_probs.detach()).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(min=1.0 - clip_ratio_low, max=1.0 + clip_ratio_high)
    per_token = {
        "pg_clipfrac": clipped > unclipped,
        "pg_clipfrac_lower": torch.zeros_like(response_mask),
        "ppo_kl": old_log_probs - log_probs,
        "ratio_mean": ratio,
    }
    return per_token_loss(torch.maximum(unclipped, clipped), response_mask, per_token)
