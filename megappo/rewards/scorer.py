"""Scores responses with the rewards of their rows, and never hides a reward that fails.

A reward that raises, or returns anything but a finite number of float32's range, leaves that
response without a score: it is marked in `ScoreResult.failed` and counted in no mean. Above
`max_error_rate` the batch is refused, for a policy that trains on failures of its verifier learns
nothing true. Rewards run in threads, and those that may hang in processes that can be killed; a
reward of a plug-in that runs in a thread brings its own time limit. `step_timeout_s` limits all
calls of a batch together.

A `Scoring` takes responses as they come, in any order, and gives the same result as if they had
all come at once: which samples share a call of a group reward follows from their numbers.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path

from megappo.config.rewards import TOTAL, RewardSection
from megappo.registry import Registry
from megappo.rewards import REWARDS, Term, resolve
from megappo.rewards.base import (
    ForeignRewardError,
    GroupReward,
    Reward,
    RewardFactory,
    RewardHungError,
    RewardTimeoutError,
    Sample,
)
from megappo.rewards.threads import RewardThreads

_log = logging.getLogger(__name__)

LARGEST = (2 - 2**-23) * 2.0**127
"""Of float32, in which a batch holds its scores; a larger one would become infinite there."""


@dataclass(frozen=True, kw_only=True)
class ScoreResult:
    """Scores of one batch on this rank, and what went wrong. B samples."""

    scores: list[float]
    """[B] in the order of the batch: weighted sums, 0 for a part that failed or gave up."""
    failed: list[bool]
    """[B] True where a reward raised or returned no finite number, or had not ended in time: the
    score is no judgement."""
    timeouts: int
    """Samples of which a reward was over its limit of time or memory; sums over ranks."""
    per_source: dict[str, tuple[float, int]]
    """data_source -> (sum of scores, samples), failed ones left out; sums over ranks."""
    per_part: dict[tuple[str, str], tuple[float, int]]
    """(data_source, label) -> (sum without weight, samples), failed ones left out."""

    @property
    def errors(self) -> int:
        """Samples that failed; sums over ranks."""
        return sum(self.failed)

    @property
    def error_rate(self) -> float:
        """Failed share, errors / B; 0 for an empty batch."""
        return self.errors / max(len(self.scores), 1)


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """Of one term of one sample."""

    score: float = 0.0
    error: Exception | None = None
    timed_out: bool = False


class Scorer:
    """Builds rewards when their data_source first appears, and keeps them between batches."""

    def __init__(
        self,
        settings: RewardSection,
        *,
        max_error_rate: float | None = None,
        registry: Registry[RewardFactory] = REWARDS,
    ) -> None:
        """Builds nothing yet.

        Args:
            settings: Rewards by data_source, threads, limits.
            max_error_rate: Share of failed samples in one batch of this rank, above which `result`
                raises; 0 allows none, 1 any number. None: that of the settings.
            registry: See `megappo.rewards.resolve`.
        """
        self.settings = settings
        self.max_error_rate = settings.max_error_rate if max_error_rate is None else max_error_rate
        self._registry = registry
        self._terms: dict[str, tuple[Term, ...]] = {}
        self._threads: RewardThreads | None = None
        self._logged: set[tuple[str, str, str, str]] = set()

    def score(
        self, batch: Sequence[Sample | tuple[str, str, str, dict[str, object]]]
    ) -> ScoreResult:
        """The score of each sample, in order.

        Raises:
            DataError: If a data_source is empty or unknown.
            RuntimeError: If more than `max_error_rate` of the samples failed.
        """
        samples = [Sample(*sample) for sample in batch]
        scoring = self.begin([sample.data_source for sample in samples])
        for number, sample in enumerate(samples):
            scoring.put(number, sample)
        return scoring.result()

    def begin(self, data_sources: Sequence[str]) -> Scoring:
        """A batch of samples of these sources, to be put one by one.

        Raises:
            DataError: If a data_source is empty or unknown.
        """
        new = set(data_sources) - self._terms.keys()
        self._terms |= resolve(new, self.settings, registry=self._registry)
        if self._threads is None:
            self._threads = RewardThreads(self.settings.num_threads)
        return Scoring(self, [self._terms[source] for source in data_sources], self._threads)

    def close(self) -> None:
        """Drops rewards that have not begun, and lets go of the others; repeatable.

        Processes end with the rewards that they belong to: idle ones now, those at work when their
        call or the interpreter ends. A later batch starts new ones.
        """
        if self._threads is not None:
            self._threads.close()
        self._threads = None
        self._terms = {}

    def report(
        self, samples: Sequence[Sample], failed: Sequence[tuple[int, str, Exception]]
    ) -> None:
        """Logs each cause once. `failed`: number of the sample, label of the reward, error.

        Raises:
            RuntimeError: If more than `max_error_rate` of the samples failed.
        """
        for number, label, error in failed:
            source = samples[number].data_source
            # Not by message: one that quotes its row would be logged for every row.
            cause = (source, label, type(error).__name__, _place(error))
            if cause not in self._logged:
                self._logged.add(cause)
                _log.warning(
                    "reward %r of data_source %r failed, sample left out (logged once): %s",
                    label,
                    source,
                    _describe(error),
                )
        rows = {number for number, _, _ in failed}
        if failed and len(rows) / len(samples) > self.max_error_rate:
            number, label, error = failed[0]
            raise RuntimeError(
                f"{len(rows)} of {len(samples)} rewards failed, above reward.max_error_rate "
                f"{self.max_error_rate}; the first is sample {number}, data_source "
                f"{samples[number].data_source!r}, reward {label!r}: {_describe(error)}. Mend the "
                "reward or this row's ground truth"
            ) from error


@dataclass(kw_only=True)
class _Call:
    """What one call of a reward scores: one sample, or a group of them."""

    reward: Reward
    members: tuple[tuple[int, str], ...]
    """number of a sample, and label of the term that is scored"""
    future: Future[list[_Outcome]] | None = None

    @property
    def is_done(self) -> bool:
        return self.future is not None and self.future.done()


class Scoring:
    """One batch on its way: `put` each sample once it is there, from any thread, then `result`."""

    def __init__(
        self, scorer: Scorer, terms: Sequence[tuple[Term, ...]], threads: RewardThreads
    ) -> None:
        """Waits for samples.

        Args:
            scorer: Takes the failures.
            terms: Of each sample.
            threads: Run the rewards.
        """
        self._scorer, self._terms, self._threads = scorer, terms, threads
        self._samples: dict[int, Sample] = {}
        self._lock = threading.Lock()
        self._calls = list(_calls(terms))
        self._of_sample: dict[int, list[_Call]] = {number: [] for number in range(len(terms))}
        for call in self._calls:
            for number, _ in call.members:
                self._of_sample[number].append(call)

    def put(self, number: int, sample: Sample) -> None:
        """Sample `number` is there; its rewards start. The same sample again changes nothing."""
        with self._lock:
            if self._samples.get(number) == sample:
                return
            self._samples[number] = sample
            for call in self._of_sample[number]:
                if all(n in self._samples for n, _ in call.members):
                    samples = [self._samples[n] for n, _ in call.members]
                    call.future = self._threads.submit(partial(_run, call.reward, samples))

    @property
    def num_done(self) -> int:
        """Samples whose score is known by now."""
        with self._lock:
            return sum(all(c.is_done for c in calls) for calls in self._of_sample.values())

    def result(self) -> ScoreResult:
        """Waits for every reward, or as long as `step_timeout_s` lets it.

        Raises:
            RuntimeError: If more than `max_error_rate` of the samples failed.
        """
        assert len(self._samples) == len(self._terms), "every sample is put before the result"
        outcomes = self._outcomes()
        for number, terms in enumerate(self._terms):
            # No term has this label.
            outcomes[number, TOTAL] = _sum(terms, [outcomes[number, t.label] for t in terms])
        samples = [self._samples[number] for number in range(len(self._terms))]
        failed = [
            (number, label, outcome.error)
            for (number, label), outcome in sorted(outcomes.items(), key=lambda item: item[0])
            if outcome.error is not None
        ]
        self._scorer.report(samples, failed)
        return self._summed(samples, outcomes, {number for number, _, _ in failed})

    def _outcomes(self) -> dict[tuple[int, str], _Outcome]:
        """Of every term. Calls that are late and have not begun are dropped."""
        limit_s = self._scorer.settings.step_timeout_s
        deadline = time.monotonic() + limit_s
        found: dict[tuple[int, str], _Outcome] = {}
        late: list[_Call] = []
        num_waiting = 0
        for call in self._calls:
            assert call.future is not None
            left_s = max(deadline - time.monotonic(), 0.0) if limit_s else None
            try:
                found.update(zip(call.members, call.future.result(left_s), strict=True))
            except TimeoutError:
                late.append(call)
                num_waiting += call.future.cancel()
        error = RewardHungError(
            f"{len(late)} of {len(self._calls)} calls of rewards had not ended {limit_s:g} s after "
            f"the responses were there, {num_waiting} of them had not begun: mend what hangs, or "
            "raise reward.step_timeout_s or reward.num_threads"
        )
        found |= {m: _Outcome(error=error, timed_out=True) for call in late for m in call.members}
        return found

    def _summed(
        self,
        samples: Sequence[Sample],
        outcomes: Mapping[tuple[int, str], _Outcome],
        failed: Container[int],
    ) -> ScoreResult:
        per_source: dict[str, tuple[float, int]] = {}
        per_part: dict[tuple[str, str], tuple[float, int]] = {}
        for number, (sample, terms) in enumerate(zip(samples, self._terms, strict=True)):
            source = sample.data_source
            for term in terms:
                outcome = outcomes[number, term.label]
                if outcome.error is None:
                    part = (source, term.label)
                    per_part[part] = _added(per_part.get(part), outcome.score)
            if number not in failed:
                total = outcomes[number, TOTAL].score
                per_source[source] = _added(per_source.get(source), total)
        return ScoreResult(
            scores=[outcomes[number, TOTAL].score for number in range(len(samples))],
            failed=[number in failed for number in range(len(samples))],
            timeouts=len({n for (n, _), o in outcomes.items() if o.timed_out}),
            per_source=per_source,
            per_part=per_part,
        )


def _sum(terms: Sequence[Term], outcomes: Sequence[_Outcome]) -> _Outcome:
    """With weights; a part that failed or gave up adds what it has, 0."""
    total = 0.0
    for term, outcome in zip(terms, outcomes, strict=True):
        total += term.weight * outcome.score
    try:
        return _Outcome(score=_checked(total))
    except ValueError as error:
        return _Outcome(error=error)


def _calls(terms: Sequence[tuple[Term, ...]]) -> Iterator[_Call]:
    """Which samples are scored together: decided by their numbers, not by when they come."""
    together: dict[int, tuple[GroupReward, list[tuple[int, str]]]] = {}
    for number, of_sample in enumerate(terms):
        for term in of_sample:
            if isinstance(term.reward, GroupReward):
                _, members = together.setdefault(id(term.reward), (term.reward, []))
                members.append((number, term.label))
            else:
                yield _Call(reward=term.reward, members=((number, term.label),))
    for reward, members in together.values():
        size = reward.group_size or len(members)
        for start in range(0, len(members), size):
            yield _Call(reward=reward, members=tuple(members[start : start + size]))


def _added(pair: tuple[float, int] | None, value: float) -> tuple[float, int]:
    total, count = pair or (0.0, 0)
    return total + value, count + 1


def _run(reward: Reward, samples: Sequence[Sample]) -> list[_Outcome]:
    """Any exception counts: rewards are plug-ins. They are counted, logged and limited."""
    if isinstance(reward, GroupReward):
        try:
            found = list(reward.score(samples))
            if len(found) != len(samples):
                raise ValueError(f"{len(found)} scores came back for {len(samples)} samples")
        except Exception as error:
            return [_outcome(error)] * len(samples)
        return [_outcome(value) for value in found]
    (sample,) = samples
    info = {**sample.extra_info, "data_source": sample.data_source}
    try:
        return [_outcome(reward(sample.response, sample.ground_truth, info))]
    except Exception as error:
        return [_outcome(error)]


def _outcome(value: object) -> _Outcome:
    gave_up = isinstance(value, RewardTimeoutError)
    if isinstance(value, Exception) and not gave_up:
        return _Outcome(error=value, timed_out=isinstance(value, RewardHungError))
    try:
        score = value.score if isinstance(value, RewardTimeoutError) else value
        return _Outcome(score=_checked(score), timed_out=gave_up)
    except Exception as error:  # a plug-in's own kind of number may raise anything
        return _Outcome(error=error, timed_out=gave_up)


def _checked(value: object) -> float:
    """The score as a float, if it is a number that float32 holds; Python's and NumPy's alike."""
    if not isinstance(value, Real):
        raise TypeError(
            f"a reward must return one number, got {value!r:.100} of type {type(value).__name__}"
        )
    score = float(value)
    if not math.isfinite(score):
        raise ValueError(f"a reward must return a finite number, got {score}")
    if abs(score) > LARGEST:
        raise ValueError(f"a score is a float32, at most {LARGEST:.8g} in size, got {score}")
    return score


def _describe(error: Exception) -> str:
    name = "" if isinstance(error, ForeignRewardError) else f"{type(error).__name__}: "
    return f"{name}{error} ({_place(error)})"


def _place(error: Exception) -> str:
    """`file:line in function` of where the error was raised."""
    if isinstance(error, ForeignRewardError):
        return error.place
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "no answer" if isinstance(error, RewardHungError) else "in its answer"
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}"
