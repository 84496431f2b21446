"""How far the engine's log-probs are from the trainer's, and what may be done about it.

Legend: B samples, T response tokens; nats. The engine draws from q (`rollout_log_probs`), the
trainer updates p (`old_log_probs`): the same weights in other kernels, so p and q differ a little.
`log_ratio` is d = log p - log q of each sampled token, and exp(d) its importance weight.

Three answers, each for one token or for a whole sample (whose d is the sum over its tokens): look
(`mismatch`), weigh (`importance_weights`), leave out (`kept_tokens`).

Left out of verl's rollout correction: weights normalised to mean 1 over a batch (each sample's
weight would depend on its neighbours), the geometric mean over a sample (it corrects for no
distribution), and a bound that only looks at one token of a sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.ppo.kl import MAX_LOG_RATIO, kl_penalty
from megappo.ppo.masking import zero_outside

LEVELS = ("token", "sequence")

LARGE_DIFF = 0.1
"""Nats. From here on a token's probability is off by a tenth or more."""


def log_ratio(old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """Trainer minus engine log-prob of each token: d = log p - log q.

    Args:
        old_log_probs: [B, T], by the trainer before the update.
        rollout_log_probs: [B, T], of the same tokens by the engine.
        response_mask: [B, T] bool.

    Returns:
        [B, T] float32, detached, 0 where masked.
    """
    return zero_outside((old_log_probs - rollout_log_probs).detach(), response_mask)


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Engine against trainer, as figures that reduce over ranks."""

    means: dict[str, tuple[float, float]]
    """name -> (sum, count). Reduce both by summing, then divide. `diff` is |d|, `k3` the KL(q || p)
    by its low-variance estimate (nats, see `kl.kl_penalty`), `share` that of tokens with
    |d| > `LARGE_DIFF`; `token_weight`, `token_weight_sq`, `sequence_weight` and
    `sequence_weight_sq` are for `effective_share`."""
    diff_max: float
    """Largest |d|; infinite where one is NaN, 0 without a token. Reduce by the maximum."""


def mismatch(old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> Mismatch:
    """Measures d over the trained tokens; arguments as of `log_ratio`.

    A sample counts as a sequence if it has a trained token. Sums are float64: squared weights of up
    to e^40 must add up.
    """
    d = log_ratio(old_log_probs, rollout_log_probs, response_mask)
    whole = response_mask.any(dim=-1)
    token, diff = _weights(d[response_mask]), d[response_mask].abs().double()
    sequence = _weights(d.sum(dim=-1)[whole])
    k3 = kl_penalty(rollout_log_probs[response_mask], old_log_probs[response_mask], "k3")
    per_token = {
        "diff": diff,
        "k3": k3.detach().double(),
        "share": (diff > LARGE_DIFF).double(),
        "token_weight": token,
        "token_weight_sq": token.square(),
    }
    per_sequence = {"sequence_weight": sequence, "sequence_weight_sq": sequence.square()}
    figures = {**per_token, **per_sequence}
    largest = torch.nan_to_num(diff, nan=math.inf).max().item() if len(diff) else 0.0
    return Mismatch(
        means={name: (x.sum().item(), float(len(x))) for name, x in figures.items()},
        diff_max=largest,
    )


def effective_share(mean_weight: float, mean_square_weight: float) -> float:
    """Effective sample size over sample size: (sum w)^2 / (n sum w^2), in (0, 1].

    Kong 1992, "A note on importance sampling using standardized weights": so large a share of the
    samples, drawn from p itself, would estimate as precisely. 1 where all weights are equal.

    Args:
        mean_weight: over all ranks.
        mean_square_weight: likewise; 0 means that there is no sample, and gives 0.
    """
    return mean_weight**2 / mean_square_weight if mean_square_weight else 0.0


def importance_weights(d: Tensor, response_mask: Tensor, *, level: str, threshold: float) -> Tensor:
    """Truncated importance weights min(exp(d), threshold), to multiply the policy loss.

    Ionides 2008, "Truncated importance sampling"; per token as Yao 2025, "Your efficient RL
    framework secretly brings you off-policy RL training". At level `sequence` a sample's weight is
    that of its summed d, given to each of its tokens: without truncation this makes the gradient
    that of samples drawn from p, exactly; the token level corrects each token given those before
    it, and lets their own mismatch be, for far less variance (Liu 2025, "When speed kills
    stability"). Deviation: d is clamped to +-20 before exp.

    Args:
        d: [B, T], as `log_ratio` gives it.
        response_mask: [B, T] bool, whole samples.
        level: one of `LEVELS`.
        threshold: largest weight, > 0.

    Returns:
        [B, T] float32, no gradient, 0 where masked. A NaN in d stays NaN.

    Raises:
        ValueError: if `level` is unknown or `threshold` not positive.
    """
    if not threshold > 0:
        raise ValueError(f"threshold must be > 0, got {threshold}: it is the largest weight")
    weights = _weights(_of_level(d, response_mask, level)).clamp(max=threshold)
    return zero_outside(weights, response_mask)


def kept_tokens(d: Tensor, response_mask: Tensor, *, level: str, threshold: float) -> Tensor:
    """The mask without tokens or samples whose weight exp(d) is not in [1 / threshold, threshold].

    Rejection by a hard bound (Liu 2025, "When speed kills stability": masked importance sampling).
    A token or sample left out counts nothing, neither in a loss nor in its denominator.

    Args:
        d: [B, T], as `log_ratio` gives it.
        response_mask: [B, T] bool, whole samples.
        level: one of `LEVELS`.
        threshold: upper bound, > 1.

    Returns:
        [B, T] bool. A NaN in d is kept, so that it shows in the loss.

    Raises:
        ValueError: if `level` is unknown or `threshold` not over 1.
    """
    if not threshold > 1:
        raise ValueError(
            f"threshold must be > 1, got {threshold}: weights are kept from 1 / threshold up to it"
        )
    return response_mask & ~(_of_level(d, response_mask, level).abs() > math.log(threshold))


def _weights(d: Tensor) -> Tensor:
    """exp(d) in float64, with d clamped."""
    return d.double().clamp(min=-MAX_LOG_RATIO, max=MAX_LOG_RATIO).exp()


def _of_level(d: Tensor, response_mask: Tensor, level: str) -> Tensor:
    """[B, T]: each token's own d, or its sample's sum."""
    if level not in LEVELS:
        raise ValueError(f"unknown level {level!r}; known: {', '.join(LEVELS)}")
    d = zero_outside(d, response_mask)
    return d if level == "token" else d.sum(dim=-1, keepdim=True).expand_as(d)
