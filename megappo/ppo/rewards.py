"""Token rewards: the score on the last trained token, less the weighted KL on every trained one.

Legend: B samples, T response tokens. Left out: how a score comes about.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.ppo.kl import kl_penalty, sequence_kl
from megappo.ppo.masking import zero_outside


def place_scores(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Puts each sample's score on its last trained token.

    On a masked slot (tool output at the end, padding) GAE would lose it. A sample without a trained
    token gets none: index `length - 1` would wrap around to the last slot of the row.

    Args:
        scores: [B].
        response_mask: [B, T] bool.

    Returns:
        [B, T] float32, 0 everywhere else.
    """
    assert scores.shape == response_mask.shape[:1], (scores.shape, response_mask.shape)
    trained_from_here = response_mask.flip(-1).cumsum(-1).flip(-1)
    is_last = response_mask & (trained_from_here == 1)
    return zero_outside(scores.unsqueeze(-1).expand(response_mask.shape), is_last)


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, factor: float) -> Tensor:
    """A penalty that grows with length over the last `buffer` tokens before the limit.

    Yu 2025 (DAPO, arXiv 2503.14476), eq. 13: 0 up to `max_length - buffer` tokens, then
    `-factor (length - (max_length - buffer)) / buffer`, never below `-factor`.

    Args:
        lengths: [B] response tokens.
        max_length: tokens at which a response is cut.
        buffer: tokens over which the penalty grows, from 1 to `max_length`.
        factor: the largest penalty, >= 0.

    Returns:
        [B] float32, in [-factor, 0].

    Raises:
        ValueError: if `buffer` is out of range.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(
            f"buffer must be from 1 to max_length {max_length}, got {buffer}: it lies before the "
            "limit"
        )
    excess = (lengths.float() - (max_length - buffer)) / buffer
    return -factor * excess.clamp(min=0.0, max=1.0)


def token_rewards(
    scores: Tensor,
    response_mask: Tensor,
    *,
    log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_kind: str = "k1",
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Rewards per token: `[t is last] score - kl_coef KL_t`.

    Ouyang 2022 (arXiv 2203.02155), eq. 2, with its KL term spread over the tokens.

    Args:
        scores: [B].
        response_mask: [B, T] bool.
        log_probs: [B, T], by the policy that the samples came from (`old_log_probs`).
        ref_log_probs: [B, T], by the reference.
        kl_coef: weight of KL, >= 0. With 0 the KL is measured if it can be, but takes no part.
        kl_kind: see `kl.kl_penalty`.

    Returns:
        `(rewards, (kl_sum, num_sequences))`: [B, T] float32, 0 on masked slots, and what
        `kl.sequence_kl` gives for the KL controller, both 0 if no log-probs were given.

    Raises:
        ValueError: if `kl_coef` is negative, or positive without both log-probs, or `kl_kind` is
            unknown.
    """
    if not kl_coef >= 0.0:
        raise ValueError(f"kl_coef must be >= 0, got {kl_coef}; a positive weight lowers the KL")
    rewards = place_scores(scores.detach(), response_mask)
    if log_probs is None or ref_log_probs is None:
        if kl_coef > 0.0:
            raise ValueError(
                f"kl_coef = {kl_coef} needs the log-probs of both policy and reference; "
                "build a reference or set kl_coef to 0"
            )
        return rewards, (rewards.new_zeros(()), rewards.new_zeros(()))
    kl = kl_penalty(
        zero_outside(log_probs.detach(), response_mask),
        zero_outside(ref_log_probs.detach(), response_mask),
        kl_kind,
    )
    if kl_coef > 0.0:
        # Not with weight 0: an infinite KL times 0 would turn the score into NaN.
        rewards = torch.where(response_mask, rewards - kl_coef * kl, rewards)
    return rewards, sequence_kl(kl, response_mask)
