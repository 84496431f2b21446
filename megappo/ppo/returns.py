"""What a response earned: as one number, or from each of its tokens on.

Legend: B samples, T response tokens. These are the returns of estimators without a critic; with
one, `advantages.compute_gae` makes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.ppo.masking import zero_outside


def outcomes(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Sum of a sample's token rewards: its score, less its weighted KL where that is in the reward.

    Args:
        rewards: [B, T], as `rewards.token_rewards` gives them.
        response_mask: [B, T] bool.

    Returns:
        [B] float32, detached; 0 for a sample without a trained token.
    """
    return zero_outside(rewards.detach(), response_mask).sum(dim=-1)


def returns_to_go(rewards: Tensor, response_mask: Tensor, *, gamma: float) -> Tensor:
    """Discounted rewards from each trained token on.

    `G_t = r_t + gamma G_{t+1}`, the return of REINFORCE++ (Hu 2025, arXiv 2501.03262, section 3)
    and of REINFORCE (Williams 1992) with `gamma` 1. As in `compute_gae`, t counts trained tokens: a
    masked slot costs no decay.

    Args:
        rewards: [B, T].
        response_mask: [B, T] bool.
        gamma: discount per trained token, in [0, 1].

    Returns:
        [B, T] float32, detached, 0 where masked.

    Raises:
        ValueError: if `gamma` lies outside [0, 1].
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma must lie in [0, 1], got {gamma}; 1.0 means no discount")
    rewards = zero_outside(rewards.detach(), response_mask)
    carry = rewards.new_zeros(len(rewards))
    returns = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        carry = torch.where(response_mask[:, t], rewards[:, t] + gamma * carry, carry)
        returns[:, t] = carry
    return zero_outside(returns, response_mask)


def spread(advantages: Tensor, response_mask: Tensor) -> Tensor:
    """One advantage a sample, given to each of its trained tokens.

    Args:
        advantages: [B].
        response_mask: [B, T] bool.

    Returns:
        [B, T] float32, 0 where masked.
    """
    return zero_outside(advantages.unsqueeze(-1).expand(response_mask.shape), response_mask)
