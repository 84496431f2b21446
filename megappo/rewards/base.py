"""What every reward has in common: its signatures, its factory, and how it gives up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from megappo.config.rewards import RewardSection

RewardFunction = Callable[[str, str, dict[str, Any]], float]
"""`(response, ground_truth, extra_info) -> score`; may be called from several threads at once.

`extra_info` has the row's other columns, and `response_tokens` and `finish_reason` of the response.
"""


class Sample(NamedTuple):
    """One response and the row that it answers."""

    data_source: str
    response: str
    ground_truth: str
    extra_info: dict[str, Any]


class GroupReward(ABC):
    """A reward that is asked for several samples at once; from several threads, too."""

    group_size: int
    """samples of a call; 0: all that a rank scores"""

    @abstractmethod
    def score(self, samples: Sequence[Sample]) -> list[float | Exception]:
        """A score or a failure for each sample; an exception is a failure of all of them."""


Reward = RewardFunction | GroupReward


class RewardFactory(Protocol):
    """Builds a reward, and imports what it needs only then."""

    def __call__(self, settings: RewardSection) -> Reward:
        """A reward with these settings.

        Raises:
            UserError: they, or this machine, do not allow it.
        """
        ...


class RewardTimeoutError(RuntimeError):
    """A reward gave up on a response at its limit of time or memory: counted apart from errors.

    It is no error of the reward, because a response may well ask for more work than there is time:
    a tower of powers in a box is a wrong answer and must not stop the run.
    """

    def __init__(self, message: str, *, score: float = 0.0) -> None:
        super().__init__(message)
        self.score = score
        """What the response gets all the same."""


class RewardHungError(RuntimeError):
    """A reward did not answer in time or was over a limit by its own fault: an error."""


class ForeignRewardError(RuntimeError):
    """What a reward raised in another process."""

    def __init__(self, message: str, *, place: str) -> None:
        super().__init__(message)
        self.place = place
        """`file:line in function`"""
