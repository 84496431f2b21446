"""What every rule-based reward has in common: its signature, its factory, and how it gives up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

RewardFunction = Callable[[str, str, dict[str, Any]], float]
"""`(response, ground_truth, extra_info) -> score`; may be called from several threads at once."""

Sample = tuple[str, str, str, dict[str, Any]]
"""`(data_source, response, ground_truth, extra_info)` of one response."""


class RewardFactory(Protocol):
    """Builds a reward function, and imports what it needs only then."""

    def __call__(self, *, method: str) -> RewardFunction:
        """`method` is how answers are found; rewards that know one way only ignore it."""
        ...


class RewardTimeoutError(RuntimeError):
    """A reward gave up on a response at its time limit: scored 0 and counted apart from errors.

    It is no error of the reward, because a response may well ask for more work than there is time:
    a tower of powers in a box is a wrong answer and must not stop the run.
    """
