"""Reward for the layout of a response: a regular expression, tags, or both. 1 or 0.

A pattern must match the whole response; `.` matches a new line too. Tags must make up the whole
response, each once and in the given order, with white space between them alone. A chat template
that opens the first tag itself leaves a response that does not begin with it: use a pattern then.

Patterns are matched by the package `regex`, which gives up on time where nested repetitions would
take for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import regex

from megappo.config.rewards import FormatRewardSection
from megappo.errors import UserError
from megappo.rewards.base import RewardFunction, RewardTimeoutError


def make(settings: FormatRewardSection) -> RewardFunction:
    """The reward with this layout.

    Raises:
        UserError: nothing is asked for, or the pattern is none.
    """
    if not settings.pattern and not settings.tags:
        raise UserError(
            "the reward 'format' has no layout to look for: set reward.format.pattern, "
            "reward.format.tags, or both"
        )
    pattern = _compiled(settings.pattern) if settings.pattern else None
    tags, timeout_s = tuple(settings.tags), settings.timeout_s

    def reward(response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        return float(
            (pattern is None or _matches(pattern, response, timeout_s=timeout_s))
            and (not tags or is_made_of(response, tags))
        )

    return reward


def is_made_of(text: str, tags: Sequence[str]) -> bool:
    """Whether text is `<a>...</a> <b>...</b>` for these tags, each of which occurs only there."""
    if any(text.count(sign) != 1 for tag in tags for sign in (f"<{tag}>", f"</{tag}>")):
        return False
    rest = text.strip()
    for tag in tags:
        before, opening, rest = rest.partition(f"<{tag}>")
        _, closing, rest = rest.partition(f"</{tag}>")
        if before.strip() or not opening or not closing:
            return False
    return not rest.strip()


def _compiled(pattern: str) -> regex.Pattern[str]:
    try:
        return regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise UserError(
            f"reward.format.pattern is {pattern!r}: it is no regular expression: {error}"
        ) from error


def _matches(pattern: regex.Pattern[str], text: str, *, timeout_s: float) -> bool:
    try:
        # concurrent: the interpreter is free for others meanwhile.
        return pattern.fullmatch(text, timeout=timeout_s, concurrent=True) is not None
    except TimeoutError as error:
        raise RewardTimeoutError(f"matching a response took over {timeout_s} s") from error
