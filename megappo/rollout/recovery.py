"""Keeps an engine working on every rank: one that fails is replaced, and its work is repeated.

Engines die, hang, refuse or break off what they were asked for. A new one needs the newest weights,
and those are spread over ranks, so one rank's failure is everyone's business:

1. After each generation and each push all ranks hear whether any engine failed.
2. Where one did, that rank ends it and starts another with the same settings.
3. All ranks export the newest weights together; engines that hold them already pass them over.
4. Requests that were lost are sent again, with their seeds, so the answers are the same.

An engine that took a part of a push is never used on. What has no remedy here: the failure of a
rank, after which the whole run must be started again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.distributed.parallel import ParallelContext, all_gather_objects, any_rank
from megappo.errors import UserError
from megappo.rollout.engine import (
    EngineFailure,
    EngineGone,
    GenerationRequest,
    OnFinished,
    RolloutEngine,
    SyncReport,
    tell_nobody,
)
from megappo.types import Completion

WeightSource = Callable[[], AbstractContextManager[Iterator[tuple[str, Tensor]]]]
"""Opens a collective export of the actor, of which every rank must take every item. Tensors may be
the parameters themselves, and are there until it is closed."""

_log = logging.getLogger(__name__)


class EnginesLost(RuntimeError):  # noqa: N818, an outcome and not a mistake
    """An engine failed once more than it may be replaced, or cannot be had again.

    Raised on all ranks alike.
    """


@dataclass(frozen=True, kw_only=True)
class Restart:
    """One engine that was replaced."""

    rank: int
    reason: str
    """First line of the failure; the rank's log has the rest."""


@dataclass(frozen=True, kw_only=True)
class Incidents:
    """What went wrong and was mended, over all ranks."""

    restarts: tuple[Restart, ...]
    num_aborted: int
    """responses that an engine broke off, or that died with it, and that were sampled again"""


@dataclass(frozen=True, kw_only=True)
class _Report:
    """What one rank tells the others."""

    failure: str | None
    is_gone: bool
    """Whether another start would not help."""
    num_restarts: int
    num_aborted: int


class EngineKeeper:
    """This rank's engine, and what it takes to replace it.

    Args:
        start: starts an engine with the model folder's weights; called again for each restart. None
            on a rank that owns no engine: it takes part in what is collective.
        context: this rank's place.
        weights: shape of every tensor of the model by its Hugging Face name; a push sends each
            once.
        max_restarts: replacements in this process's life.
    """

    def __init__(
        self,
        start: Callable[[], RolloutEngine] | None,
        *,
        context: ParallelContext,
        weights: Mapping[str, Sequence[int]],
        max_restarts: int,
    ) -> None:
        self._start = start
        self._context = context
        self._weights = weights
        self._max_restarts = max_restarts
        self._num_restarts = 0
        self._num_aborted = 0
        """On this rank, not told to the others yet."""
        self._incidents = Incidents(restarts=(), num_aborted=0)
        self._source: WeightSource | None = None
        self._version = 0
        self._held: SyncReport | None = None
        """Of the push of `_version`, once this engine has it whole."""
        self._asleep = False
        self._failed_asleep: str | None = None
        self._is_gone = False
        self._lost: EnginesLost | None = None
        self._engine = None if start is None else start()

    @property
    def weight_version(self) -> int:
        """Of the last push; 0 are the model folder's weights."""
        return self._version

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_finished: OnFinished = tell_nobody
    ) -> list[Completion]:
        """One completion a request, in the order of the requests. Collective over the world.

        Of a response that is sampled again `on_finished` hears again.

        Raises:
            EnginesLost: on all ranks, if an engine failed and may not be replaced.
        """
        if self._lost is not None:
            raise self._lost
        answers: list[Completion] | None = None
        while True:
            failure = None
            if answers is None:
                answers, failure = self._try(requests, on_finished)
            if not self._tell(failure) and answers is not None:
                return answers
            self._recover(failure)

    def push(self, source: WeightSource, *, version: int) -> SyncReport | None:
        """New weights for every engine; one that sleeps wakes. Collective over the world.

        Where an engine has used up its restarts, the next `generate` says so: a step whose update
        is done can be logged and saved like any other.

        Returns:
            What this rank's engine took; None where an engine is lost.
        """
        self._source, self._version, self._held = source, version, None
        try:
            failure = self._load()
            if self._tell(failure):
                self._recover(failure)
        except EnginesLost as lost:
            self._lost = lost
        return self._held

    def sleep(self) -> int:
        """Gives device memory back until the next push; returns the bytes that came free.

        An engine that cannot is ended, which frees its memory as well; the push replaces it.
        """
        if self._engine is None:
            return 0
        self._asleep = True
        try:
            return self._engine.sleep()
        except EngineFailure as error:
            self._engine.shutdown()
            self._failed_asleep = self._note(error)
            return 0

    def take_incidents(self) -> Incidents:
        """What happened since the last call; equal on all ranks."""
        taken, self._incidents = self._incidents, Incidents(restarts=(), num_aborted=0)
        return taken

    def shutdown(self) -> None:
        """Ends the engine. May be called twice."""
        if self._engine is not None:
            self._engine.shutdown()

    def _try(
        self, requests: Sequence[GenerationRequest], on_finished: OnFinished
    ) -> tuple[list[Completion] | None, str | None]:
        """Answers, or what failed."""
        if self._engine is None:
            assert not requests, "requests came to a rank without an engine"
            return [], None
        before = self._engine.num_aborted
        try:
            answers = self._engine.generate(requests, on_finished=on_finished)
        except EngineFailure as error:
            self._num_aborted += len(requests)
            return None, self._note(error)
        self._num_aborted += self._engine.num_aborted - before
        return answers, None

    def _tell(self, failure: str | None) -> bool:
        """Whether an engine failed on any rank. Collective over the world.

        Raises:
            EnginesLost: on all ranks, if one of these may not be replaced.
        """
        if not any_rank(failure is not None or self._num_aborted > 0, self._context):
            return False
        mine = _Report(
            failure=failure,
            is_gone=self._is_gone,
            num_restarts=self._num_restarts,
            num_aborted=self._num_aborted,
        )
        self._num_aborted = 0
        reports: list[_Report] = all_gather_objects(mine, self._context.world_group)
        restarts = []
        for rank, report in enumerate(reports):
            if report.failure is None:
                continue
            if report.is_gone:
                raise EnginesLost(f"the engine of rank {rank} is lost: {report.failure}")
            if report.num_restarts >= self._max_restarts:
                raise EnginesLost(
                    f"the engine of rank {rank} failed after {report.num_restarts} restarts, and "
                    f"rollout.max_restarts is {self._max_restarts}: {report.failure}"
                )
            restarts.append(Restart(rank=rank, reason=report.failure))
        self._incidents = Incidents(
            restarts=(*self._incidents.restarts, *restarts),
            num_aborted=self._incidents.num_aborted + sum(r.num_aborted for r in reports),
        )
        return bool(restarts)

    def _recover(self, failure: str | None) -> None:
        """From a failure that all ranks know of to engines with the newest weights everywhere.

        Collective over the world.
        """
        while True:
            failure = self._restart() if failure is not None else None
            if self._tell(failure):
                continue
            failure = self._load()
            if not self._tell(failure):
                return

    def _restart(self) -> str | None:
        """Another engine in place of this one; what failed if it does not start.

        Also a mistake in what it is started from, a model folder that is gone meanwhile: an
        exception here would leave the other ranks alone, and nothing saved.
        """
        assert self._engine is not None, "only an engine fails"
        assert self._start is not None
        self._engine.shutdown()
        self._make_room()
        self._num_restarts += 1
        self._held, self._asleep = None, False
        try:
            self._engine = self._start()
        except (EngineFailure, UserError) as error:
            return self._note(error)
        return None

    def _load(self) -> str | None:
        """Takes part in an export, and loads it if this engine lacks it; what failed.

        Collective over the world.
        """
        assert self._source is not None, "weights are pushed before the first generation"
        with self._source() as tensors:
            return self._load_from(tensors)

    def _load_from(self, tensors: Iterator[tuple[str, Tensor]]) -> str | None:
        failure, self._failed_asleep = self._failed_asleep, None
        if failure is None and self._held is None and self._engine is not None:
            try:
                self._wake(self._engine)
                self._held = self._engine.update_weights(
                    tensors, expected_names=self._weights, version=self._version
                )
            except EngineFailure as error:
                failure = self._note(error)
        # Other ranks gather each of them with this one, whatever became of the engine.
        for _ in tensors:
            pass
        return failure

    def _wake(self, engine: RolloutEngine) -> None:
        if self._asleep:
            self._make_room()
            engine.wake()
            self._asleep = False

    def _make_room(self) -> None:
        """Returns what PyTorch keeps for later use, so that an engine can have it."""
        if self._context.device.type == "cuda":
            torch.cuda.empty_cache()

    def _note(self, error: EngineFailure | UserError) -> str:
        """First line, for messages and events; the whole, with the end of a log, goes to ours."""
        self._is_gone = self._is_gone or isinstance(error, EngineGone)
        _log.warning("%s", error)
        return str(error).partition("\n")[0]
