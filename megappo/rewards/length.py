"""Reward for the length of a response, in tokens of the policy; as a part of a sum.

1 from min_tokens to free_tokens, then falling in a straight line to 0 at max_tokens. A penalty on
responses that are cut is another matter: `algorithm` has it, after the rewards.
"""

from __future__ import annotations

from typing import Any

from megappo.config.rewards import LengthRewardSection
from megappo.rewards.base import RewardFunction


def make(settings: LengthRewardSection) -> RewardFunction:
    """The reward with these limits."""

    def reward(response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        return score(
            extra_info["response_tokens"],
            min_tokens=settings.min_tokens,
            free_tokens=settings.free_tokens,
            max_tokens=settings.max_tokens,
        )

    return reward


def score(num_tokens: int, *, min_tokens: int, free_tokens: int, max_tokens: int) -> float:
    """From 0 to 1, see the top of this file; min_tokens <= free_tokens < max_tokens."""
    if num_tokens < min_tokens:
        return 0.0
    left = (max_tokens - num_tokens) / (max_tokens - free_tokens)
    return min(1.0, max(0.0, left))
