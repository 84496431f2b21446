"""Advantages: GAE over trained tokens, whitening, and baselines within a group of siblings.

Legend: B samples, T response tokens. Everything returned is float32 and detached: an advantage is
a constant of the policy loss. Left out: reduction over ranks. The caller of `whiten` hands in
moments that it reduced itself, and the caller of `group_advantages` hands in whole groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.ppo.masking import masked_moments, zero_outside

GROUP_KINDS = ("dr_grpo", "grpo", "rloo")

WHITEN_EPS = 1e-8
"""Added to the variance before the root."""
GROUP_STD_EPS = 1e-6
"""Added to a group's standard deviation, as in verl."""


def compute_gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the trained tokens of each sample.

    Schulman 2016 (arXiv 1506.02438), eq. 11 and 16: `delta_t = r_t + gamma V_{t+1} - V_t` and
    `A_t = delta_t + gamma lam A_{t+1}`; the critic's target is `return_t = A_t + V_t`.
    Deviation: t counts *trained* tokens. A masked slot (tool output, padding) is no step: it costs
    no decay, pays no reward and has no value, so the result is that of the sample with those slots
    cut out. Put the reward on a trained token (`rewards.place_scores` does); on a masked one it is
    lost.

    Args:
        rewards: [B, T].
        values: [B, T], V of the state *before* token t, in the unit of the rewards.
        response_mask: [B, T] bool.
        gamma: discount per trained token, in [0, 1].
        lam: the bias-variance weight, in [0, 1].
        bootstrap_values: [B], V of the state after the last token: for a response that was cut at
            the length limit. 0 for one that ended by itself. None means that every end is final.

    Returns:
        `(advantages, returns)`, [B, T] float32, 0 on masked slots.

    Raises:
        ValueError: if `gamma` or `lam` lies outside [0, 1].
    """
    _require_unit_interval("gamma", gamma)
    _require_unit_interval("lam", lam)
    rewards = zero_outside(rewards.detach(), response_mask)
    # Zeroed before the recursion: the critic's output on padding would otherwise be a next value.
    values = zero_outside(values.detach(), response_mask)
    num_samples, num_tokens = values.shape
    next_value = values.new_zeros(num_samples)
    if bootstrap_values is not None:
        assert bootstrap_values.shape == (num_samples,), tuple(bootstrap_values.shape)
        next_value = bootstrap_values.detach().to(values)
    # The carry starts at 0 even with a bootstrap: nothing after the cut was observed.
    carry = values.new_zeros(num_samples)
    advantages = torch.zeros_like(values)
    for t in reversed(range(num_tokens)):
        trained = response_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        carry = torch.where(trained, delta + gamma * lam * carry, carry)
        next_value = torch.where(trained, values[:, t], next_value)
        advantages[:, t] = carry
    advantages = zero_outside(advantages, response_mask)
    return advantages, advantages + values


def whiten(
    x: Tensor,
    mask: Tensor,
    *,
    moments: tuple[Tensor | float, Tensor | float] | None = None,
) -> Tensor:
    """Shifts and scales `x` to mean 0 and variance 1 over the mask; 0 elsewhere.

    The variance is the population's (divided by n), so that one token or equal values give 0 and
    not 0/0. Deviation: verl divides by n - 1.

    Args:
        x: [B, T].
        mask: [B, T] bool.
        moments: `(mean, population variance)` over all data and context parallel ranks, each token
            counted once (`masking.local_sum_count`, then `masking.local_sq_dev`). None takes them
            from this tensor, which is right on a single rank only.

    Returns:
        [B, T] float32, finite for an empty mask and for variance 0.
    """
    x = zero_outside(x.detach(), mask)
    mean, variance = masked_moments(x, mask) if moments is None else moments
    scale = torch.as_tensor(variance, dtype=torch.float64, device=x.device) + WHITEN_EPS
    return zero_outside((x.double() - mean) * scale.rsqrt(), mask)


def group_advantages(
    scores: Tensor, group_ids: Tensor, *, kind: str, counted: Tensor | None = None
) -> Tensor:
    """Advantage of each response against its siblings, the responses to the same prompt.

    With a group's n scores, their mean m and sample standard deviation s (divided by n - 1):
    `grpo` (Shao 2024, arXiv 2402.03300, section 4.1.2) is `(score - m) / (s + 1e-6)`;
    `dr_grpo` (Liu 2025, arXiv 2503.20783) is `score - m`;
    `rloo` (Ahmadian 2024, arXiv 2402.14740) is the score less the mean of the *other* n - 1,
    which equals `(score - m) n / (n - 1)`.

    Equal scores give 0. A group of one gives 0 for every kind: without a sibling there is nothing
    to compare with. A sample that does not count (masked, aborted) is no member of
    its group. Deviation: for a group of one verl takes the mean as 0 and the deviation as 1, so
    that the bare score is the advantage. The sample standard deviation is as in verl (`torch.std`).

    Args:
        scores: [B] float.
        group_ids: [B] int64, equal for siblings; any values, any order, each group whole.
        kind: `grpo`, `dr_grpo` or `rloo`.
        counted: [B] bool, the samples that are members; None counts all.

    Returns:
        [B] float32, 0 for samples that do not count. A NaN score makes its own group NaN and no
        other.

    Raises:
        ValueError: if `kind` is unknown.
    """
    if kind not in GROUP_KINDS:
        raise ValueError(f"unknown group advantage {kind!r}; known: {', '.join(GROUP_KINDS)}")
    assert scores.shape == group_ids.shape, (tuple(scores.shape), tuple(group_ids.shape))
    if counted is None:
        counted = torch.ones_like(scores, dtype=torch.bool)
    # Float64: three equal scores of 0.1 have a float32 mean that differs from 0.1 by a rounding
    # error, which a division by their standard deviation, another rounding error, would blow up.
    scores = torch.where(counted, scores.detach().double(), 0.0)
    num_groups, group = _dense_groups(group_ids)
    size = _group_sum(counted.double(), group, num_groups)
    mean = _group_sum(scores, group, num_groups) / size.clamp(min=1.0)
    centred = torch.where(counted, scores - mean[group], 0.0)
    others = (size - 1.0).clamp(min=1.0)
    if kind == "grpo":
        std = (_group_sum(centred.square(), group, num_groups) / others).sqrt()
        return (centred / (std[group] + GROUP_STD_EPS)).float()
    if kind == "rloo":
        return (centred * (size / others)[group]).float()
    return centred.float()


def _dense_groups(group_ids: Tensor) -> tuple[int, Tensor]:
    """Number of groups, and [B] the group of each sample counted from 0."""
    unique, group = torch.unique(group_ids, return_inverse=True)
    return unique.numel(), group


def _group_sum(x: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """[num_groups] sums of `x` [B] over the samples of each group."""
    return x.new_zeros(num_groups).index_add(0, group, x)


def _require_unit_interval(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must lie in [0, 1], got {value}; 1.0 means no discount")
