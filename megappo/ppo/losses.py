"""What actor and critic minimise, token by token, and how tokens are weighed into one loss.

Legend: B samples, T response tokens; every loss is float32 and minimised.

A loss here is [B, T] and not a number: its mean depends on counts over all ranks and
micro-batches, which only the caller knows. For any split of the mini-batch into parts the loss is
exactly the sum over parts of `(loss * aggregation_weights).sum()`, divided once by the sum over
parts of `local_denominator`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.ppo.kl import MAX_LOG_RATIO, kl_penalty
from megappo.ppo.masking import masked_count, masked_sum, zero_outside

LOSS_AGG_MODES = ("seq-mean-token-mean", "seq-mean-token-sum", "token-mean")


@dataclass(frozen=True, kw_only=True)
class PerTokenLoss:
    """A loss before any averaging."""

    loss: Tensor
    """[B, T] float32, 0 where masked; carries the gradient."""
    metrics: dict[str, tuple[Tensor, Tensor]]
    """name -> (sum, count) over trained tokens, 0-dim float32, detached. Reduce both by summing
    over micro-batches and ranks, then divide."""


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None,
) -> PerTokenLoss:
    """PPO's clipped surrogate with dual clip.

    With `ratio = exp(log_probs - old_log_probs)`, Schulman 2017 (arXiv 1707.06347), eq. 7 negated:
    `max(-A ratio, -A clip(ratio, 1 - low, 1 + high))`. For A < 0 that has no upper bound, so there
    Ye 2020 (arXiv 1912.09729, dual-clip PPO) takes `min(that, -A c)`. Deviations: the clip has
    two sides of their own (Yu 2025, arXiv 2503.14476), and the log-ratio is clamped to +-20
    before exp.

    Args:
        log_probs: [B, T], by the actor now; carries the gradient.
        old_log_probs: [B, T], by the actor before the update.
        advantages: [B, T].
        response_mask: [B, T] bool.
        clip_ratio_low: lower side of the clip, in [0, 1].
        clip_ratio_high: upper side of the clip, >= 0.
        clip_ratio_c: bound of the ratio where A < 0, > 1; None for no such bound.

    Returns:
        The loss, with metrics `pg_clipfrac` (tokens where the clipped side was taken),
        `pg_clipfrac_lower` (tokens where the bound c was taken), `ppo_kl` (k1 of old against new,
        nats, not clamped) and `ratio_mean`.

    Raises:
        ValueError: if a clip is out of its range.
    """
    _require_clips(clip_ratio_low, clip_ratio_high, clip_ratio_c)
    log_probs = zero_outside(log_probs, response_mask)
    old_log_probs = zero_outside(old_log_probs.detach(), response_mask)
    advantages = zero_outside(advantages.detach(), response_mask)
    log_ratio = log_probs - old_log_probs
    ratio = log_ratio.clamp(min=-MAX_LOG_RATIO, max=MAX_LOG_RATIO).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(min=1.0 - clip_ratio_low, max=1.0 + clip_ratio_high)
    loss = torch.maximum(unclipped, clipped)
    bounded = torch.zeros_like(response_mask)
    if clip_ratio_c is not None:
        bound = -advantages * clip_ratio_c
        bounded = (advantages < 0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
    per_token = {
        "pg_clipfrac": clipped > unclipped,
        "pg_clipfrac_lower": bounded,
        "ppo_kl": -log_ratio,
        "ratio_mean": ratio,
    }
    return per_token_loss(loss, response_mask, per_token)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    clip_range: float | None,
) -> PerTokenLoss:
    """The critic's squared error, with the step of a value clipped.

    `0.5 max((V - R)^2, (clip(V, V_old - range, V_old + range) - R)^2)`, the value clipping of the
    PPO code of Schulman 2017; the paper itself has only the squared error.

    Args:
        values: [B, T], by the critic now; carries the gradient.
        old_values: [B, T], by the critic before the update.
        returns: [B, T].
        response_mask: [B, T] bool.
        clip_range: in the unit of the values, > 0; None for no clipping.

    Returns:
        The loss, with metrics `vf_clipfrac` (tokens where the clipped side was taken) and
        `vpred_mean` (the values themselves).

    Raises:
        ValueError: if `clip_range` is not positive.
    """
    if clip_range is not None and not clip_range > 0.0:
        raise ValueError(f"clip_range must be > 0, got {clip_range}; null switches clipping off")
    values = zero_outside(values, response_mask)
    old_values = zero_outside(old_values.detach(), response_mask)
    returns = zero_outside(returns.detach(), response_mask)
    squared = (values - returns).square()
    took_clipped = torch.zeros_like(response_mask)
    loss = squared
    if clip_range is not None:
        near = torch.clamp(values, min=old_values - clip_range, max=old_values + clip_range)
        squared_near = (near - returns).square()
        took_clipped = squared_near > squared
        loss = torch.maximum(squared, squared_near)
    per_token = {"vf_clipfrac": took_clipped, "vpred_mean": values}
    return per_token_loss(0.5 * loss, response_mask, per_token)


def entropy_loss(entropy: Tensor, response_mask: Tensor) -> PerTokenLoss:
    """The negated entropy: added times `entropy_coef` >= 0, it raises the entropy.

    Args:
        entropy: [B, T], nats, of the policy at each token; carries the gradient.
        response_mask: [B, T] bool.

    Returns:
        The loss, with metric `entropy` (not negated).
    """
    return per_token_loss(-entropy, response_mask, {"entropy": entropy})


def kl_loss(
    log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor, *, kind: str
) -> PerTokenLoss:
    """KL to the reference as a loss: added times `kl_loss_coef` >= 0, it lowers the KL.

    The head of `kl.py` says what gradient each kind has; `k3+` is the sound choice.

    Args:
        log_probs: [B, T], by the actor now; carries the gradient.
        ref_log_probs: [B, T], by the reference.
        response_mask: [B, T] bool.
        kind: see `kl.kl_penalty`.

    Returns:
        The loss, with metric `kl_loss` (nats).

    Raises:
        ValueError: if `kind` is unknown.
    """
    log_probs = zero_outside(log_probs, response_mask)
    ref_log_probs = zero_outside(ref_log_probs.detach(), response_mask)
    kl = kl_penalty(log_probs, ref_log_probs, kind)
    return per_token_loss(kl, response_mask, {"kl_loss": kl})


def aggregation_weights(response_mask: Tensor, mode: str) -> Tensor:
    """Weight of each token in the sum that `local_denominator` divides.

    `token-mean` and `seq-mean-token-sum` weigh every trained token 1; `seq-mean-token-mean`
    weighs it 1 over the number of trained tokens in its sample.

    Args:
        response_mask: [B, T] bool, *whole* samples: under context parallelism take the slice of the
            weights, not the weights of the slice.
        mode: one of `LOSS_AGG_MODES`.

    Returns:
        [B, T] float32, 0 where masked.

    Raises:
        ValueError: if `mode` is unknown.
    """
    _require_mode(mode)
    weights = response_mask.float()
    if mode == "seq-mean-token-mean":
        weights = weights / response_mask.sum(dim=-1, keepdim=True).clamp(min=1)
    return weights


def local_denominator(response_mask: Tensor, mode: str) -> Tensor:
    """This part's share of what the weighted sum is divided by: 0-dim float32.

    Trained tokens for `token-mean`; samples with at least one trained token for the other modes.
    Sum it over the mini-batch and its data parallel ranks; an empty or masked sample counts 0.
    The global sum may be 0: the caller then divides by 1, and the loss is 0.

    Args:
        response_mask: [B, T] bool, whole samples.
        mode: one of `LOSS_AGG_MODES`.

    Raises:
        ValueError: if `mode` is unknown.
    """
    _require_mode(mode)
    return masked_count(response_mask if mode == "token-mean" else response_mask.any(dim=-1))


def per_token_loss(loss: Tensor, mask: Tensor, per_token: dict[str, Tensor]) -> PerTokenLoss:
    """Masks a loss and sums each metric over the trained tokens.

    Args:
        loss: [B, T], carries the gradient.
        mask: [B, T] bool.
        per_token: name -> [B, T].
    """
    count = masked_count(mask)
    metrics = {name: (masked_sum(x.detach(), mask), count) for name, x in per_token.items()}
    return PerTokenLoss(loss=zero_outside(loss, mask), metrics=metrics)


def _require_clips(low: float, high: float, c: float | None) -> None:
    if not 0.0 <= low <= 1.0:
        raise ValueError(
            f"clip_ratio_low must lie in [0, 1], got {low}: the ratio is kept above 1 - low, "
            "and no ratio is negative"
        )
    if not high >= 0.0:
        raise ValueError(
            f"clip_ratio_high must be >= 0, got {high}: the ratio is kept below 1 + high"
        )
    if c is not None and not c > 1.0:
        raise ValueError(
            f"clip_ratio_c must be > 1, got {c}: from 1 down it would clip the unchanged policy; "
            "3.0 is usual, null switches it off"
        )


def _require_mode(mode: str) -> None:
    if mode not in LOSS_AGG_MODES:
        raise ValueError(f"unknown loss_agg_mode {mode!r}; known: {', '.join(LOSS_AGG_MODES)}")
