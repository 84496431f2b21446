"""Scores a batch of responses with the reward of each row, and never hides a reward that fails.

A reward that raises, or returns anything but a finite number, scores that response 0 and is counted
in `ScoreResult.errors`; above `max_error_rate` the batch is refused, for a policy that trains on
failures of its verifier learns nothing true. Not here: time limits. A thread cannot be stopped
from outside, so a reward that may hang brings its own limit and raises `RewardTimeoutError`, as
math does.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

from megappo.errors import UserError
from megappo.registry import Registry
from megappo.rewards import REWARDS, resolve
from megappo.rewards.base import RewardFactory, RewardFunction, RewardTimeoutError, Sample

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ScoreResult:
    """Scores of one batch on this rank, and what went wrong. B samples."""

    scores: list[float]
    """[B] in the order of the batch; 0 where the reward failed or gave up."""
    errors: int
    """Samples whose reward raised or returned no finite number; sums over ranks."""
    timeouts: int
    """Samples whose reward gave up on time or memory; sums over ranks, not part of `errors`."""
    per_source: dict[str, tuple[float, int]]
    """data_source -> (sum of scores, samples), failed ones included; sums over ranks."""

    @property
    def error_rate(self) -> float:
        """Failed share, errors / B; 0 for an empty batch. The metric `reward_error`."""
        return self.errors / max(len(self.scores), 1)


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    score: float = 0.0
    error: Exception | None = None
    timed_out: bool = False


class Scorer:
    """Runs reward functions over batches, in threads if asked; keeps them between batches."""

    def __init__(
        self,
        *,
        num_threads: int,
        max_error_rate: float,
        method: str = "strict",
        registry: Registry[RewardFactory] = REWARDS,
    ) -> None:
        """Checks the settings; rewards are built when their data_source first appears.

        Args:
            num_threads: Reward functions at once; 1 runs them in the calling thread. More help
                rewards that wait (a subprocess, a server), not those that compute in Python.
            max_error_rate: Share of failed rewards in one batch of this rank, above which `score`
                raises; 0 allows none, 1 any number.
            method: See `megappo.rewards.resolve`.
            registry: See `megappo.rewards.resolve`.

        Raises:
            UserError: If a number is out of range.
        """
        if num_threads < 1:
            raise UserError(f"reward.num_threads must be at least 1, got {num_threads}")
        if not 0.0 <= max_error_rate <= 1.0:
            raise UserError(
                f"reward.max_error_rate must be a share from 0 to 1, got {max_error_rate}"
            )
        self._num_threads = num_threads
        self._max_error_rate = max_error_rate
        self._method = method
        self._registry = registry
        self._functions: dict[str, RewardFunction] = {}
        self._logged: set[tuple[str, str, str]] = set()

    def score(self, batch: Sequence[Sample]) -> ScoreResult:
        """The score of each sample, in order.

        Args:
            batch: [B] of (data_source, response, ground_truth, extra_info).

        Raises:
            DataError: If a data_source is empty or unknown.
            RuntimeError: If more than `max_error_rate` of the rewards failed.
        """
        self._build({sample[0] for sample in batch})
        outcomes = self._run(batch)
        self._report(batch, outcomes)
        per_source: dict[str, tuple[float, int]] = {}
        for sample, outcome in zip(batch, outcomes, strict=True):
            total, count = per_source.get(sample[0], (0.0, 0))
            per_source[sample[0]] = (total + outcome.score, count + 1)
        return ScoreResult(
            scores=[outcome.score for outcome in outcomes],
            errors=sum(outcome.error is not None for outcome in outcomes),
            timeouts=sum(outcome.timed_out for outcome in outcomes),
            per_source=per_source,
        )

    def _build(self, data_sources: set[str]) -> None:
        new = data_sources - self._functions.keys()
        self._functions |= resolve(new, method=self._method, registry=self._registry)

    def _run(self, batch: Sequence[Sample]) -> list[_Outcome]:
        if self._num_threads == 1:
            return [self._score_one(sample) for sample in batch]
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="reward") as pool:
            return list(pool.map(self._score_one, batch))

    def _score_one(self, sample: Sample) -> _Outcome:
        data_source, response, ground_truth, extra_info = sample
        try:
            value = self._functions[data_source](response, ground_truth, extra_info)
            return _Outcome(score=_checked(value))
        except RewardTimeoutError:
            return _Outcome(timed_out=True)
        except Exception as error:
            # Any exception: rewards are plug-ins. It is counted, logged and limited in `_report`.
            return _Outcome(error=error)

    def _report(self, batch: Sequence[Sample], outcomes: Sequence[_Outcome]) -> None:
        failed = [(row, o.error) for row, o in enumerate(outcomes) if o.error is not None]
        for row, error in failed:
            # Not by message: one that quotes its row would be logged for every row.
            cause = (batch[row][0], type(error).__name__, _place(error))
            if cause not in self._logged:
                self._logged.add(cause)
                _log.warning(
                    "reward of data_source %r failed, sample scored 0 (logged once): %s",
                    batch[row][0],
                    _describe(error),
                )
        if failed and len(failed) / len(batch) > self._max_error_rate:
            row, error = failed[0]
            raise RuntimeError(
                f"{len(failed)} of {len(batch)} rewards failed, above reward.max_error_rate "
                f"{self._max_error_rate}; the first is sample {row}, data_source "
                f"{batch[row][0]!r}: {_describe(error)}. Mend the reward or this row's ground truth"
            ) from error


def _checked(value: object) -> float:
    """The score as a float, if it is a finite number; Python and NumPy numbers alike."""
    if not isinstance(value, Real):
        raise TypeError(
            f"a reward must return one number, got {value!r:.100} of type {type(value).__name__}"
        )
    score = float(value)
    if not math.isfinite(score):
        raise ValueError(f"a reward must return a finite number, got {score}")
    return score


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error} ({_place(error)})"


def _place(error: Exception) -> str:
    """`file:line in function` of where the error was raised."""
    raised_at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(raised_at.filename).name}:{raised_at.lineno} in {raised_at.name}"
