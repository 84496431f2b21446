"""Reward by a function of the user's own file, in worker processes with limits.

What it prints goes to the rank's log. A call over its time, memory or number of processes is an
error of the reward, and its process is killed with all below it. See `custom_worker` for how the
function is called. Of an async function of one sample only the samples that hang are errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megappo.config.rewards import CustomRewardSection
from megappo.errors import UserError
from megappo.rewards.base import (
    ForeignRewardError,
    GroupReward,
    Reward,
    RewardHungError,
    Sample,
)
from megappo.rewards.worker_pool import Limits, OverLimitError, WorkerPool

ANSWER_MARGIN_S = 10.0
"""After `timeout_s` an async function has this long to let the others' scores be told."""


def make(settings: CustomRewardSection, *, num_workers: int) -> Reward:
    """The reward, with one process up: its file is loaded and its signature is known to be right.

    Args:
        settings: Of the function.
        num_workers: Most processes at once.

    Raises:
        UserError: there is no such file or function, or its parameters are not known.
    """
    path = Path(settings.path)
    if not settings.path or not path.is_file():
        raise UserError(
            f"reward.custom.path is {settings.path!r}: no such file; name the Python file of the "
            f"function {settings.name}"
        )
    pool = WorkerPool(
        "megappo.rewards.custom_worker",
        limits=Limits(
            timeout_s=settings.timeout_s,
            memory_bytes=settings.memory_mb * 2**20,
            max_processes=settings.max_processes,
            max_reply_bytes=64 * 1024**2,
        ),
        num_workers=num_workers,
        settings={
            "path": str(path.absolute()),
            "name": settings.name,
            "sample_timeout_s": settings.timeout_s,
        },
    )
    kind = pool.start()
    if kind["is_batch"] or kind["is_async"]:
        margin_s = 0.0 if kind["is_batch"] else ANSWER_MARGIN_S
        return CustomGroupReward(pool, settings, margin_s=margin_s)
    return _OneByOne(pool, settings)


class CustomGroupReward(GroupReward):
    """A function that is asked for several samples in one call."""

    def __init__(self, pool: WorkerPool, settings: CustomRewardSection, *, margin_s: float) -> None:
        self.group_size = settings.batch_size
        self._pool, self._settings, self._margin_s = pool, settings, margin_s

    def score(self, samples: Sequence[Sample]) -> list[float | Exception]:
        """See `GroupReward`."""
        return _ask(self._pool, samples, self._settings, margin_s=self._margin_s)


class _OneByOne:
    """A function of one sample, as a `RewardFunction`."""

    def __init__(self, pool: WorkerPool, settings: CustomRewardSection) -> None:
        self._pool, self._settings = pool, settings

    def __call__(self, response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        source = str(extra_info["data_source"])
        (found,) = _ask(
            self._pool, [Sample(source, response, ground_truth, extra_info)], self._settings
        )
        if isinstance(found, Exception):
            raise found
        return found


def _ask(
    pool: WorkerPool,
    samples: Sequence[Sample],
    settings: CustomRewardSection,
    *,
    margin_s: float = 0.0,
) -> list[float | Exception]:
    what = f"{settings.name} of {settings.path}"
    remedy = "mend it, or raise a limit of reward.custom"
    try:
        request = {"samples": [list(sample) for sample in samples]}
        reply = pool.ask(request, margin_s=margin_s)
    except OverLimitError as error:
        raise RewardHungError(f"{what} {error}: {remedy}") from error
    hung = set(reply.get("hung", ()))
    found: list[float | Exception] = []
    for number, entry in enumerate(reply["scores"]):
        if number in hung:
            found.append(RewardHungError(f"{what} took over {settings.timeout_s} s: {remedy}"))
        elif entry[0] is None:
            found.append(ForeignRewardError(entry[1], place=entry[2]))
        else:
            found.append(float(entry[0]))
    return found
