"""Traces of chosen steps by PyTorch's profiler, one file a rank: `profile/step_N_rank_R.json.gz`.

A trace opens in Perfetto or chrome://tracing; the step's phases stand in it as `phase/<name>`
(`Stopwatch`). Numbers are the same with and without it. One step is recorded at a time, without
shapes, stacks or memory, and a rank whose host memory grows by more than `trainer.profile_max_gb`
while it records ends its trace there. Left out: the engines' own processes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

from megappo.distributed.parallel import ParallelContext
from megappo.trainer.records import Records
from megappo.trainer.resources import GIB

Report = Callable[[int, str, dict[str, Any]], None]
"""Takes step, sentence and the event's details."""


@dataclass(kw_only=True)
class StepProfiler:
    """Records the steps of a list on one rank. Nothing here communicates."""

    steps: Collection[int]
    folder: Path
    rank: int
    device: torch.device
    max_gb: float
    report: Report
    """rank 0's screen and events; nothing on other ranks"""
    _profile: profile | None = field(default=None, init=False)
    _memory: int = field(default=0, init=False)
    """bytes of this process when recording began"""
    _ended_early: bool = field(default=False, init=False)
    _problem: str = field(default="", init=False)
    """why the profiler could not be stopped"""

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Records the block, if its step is one of the list. One that raises leaves no trace."""
        if step not in self.steps:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._ended_early, self._problem, self._memory = False, "", _memory_bytes()
        recorded = profile(activities=activities)
        try:
            recorded.start()
        except RuntimeError as error:
            self._tell(step, f"the trace of rank {self.rank} could not be started: {error}", 0.0)
            yield
            return
        self._profile = recorded
        try:
            yield
        finally:
            self._stop()
        self._write(step, recorded)

    def watch(self) -> None:
        """Ends a trace that takes too much memory; called at each phase and forward pass."""
        if self._profile is not None and _memory_bytes() - self._memory > self.max_gb * GIB:
            self._stop()
            self._ended_early = True

    def _stop(self) -> None:
        if self._profile is not None:
            running, self._profile = self._profile, None
            try:
                running.stop()
            except RuntimeError as error:
                self._problem = str(error)

    def _write(self, step: int, recorded: profile) -> None:
        """A trace that cannot be written must not end a run."""
        path = self.folder / f"step_{step}_rank_{self.rank}.json.gz"
        started = time.perf_counter()
        try:
            if self._problem:
                raise RuntimeError(self._problem)
            self.folder.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))
            text = f"trace of rank {self.rank} in {path}"
        except (OSError, RuntimeError) as error:  # the disk's, and those of PyTorch's profiler
            text = f"the trace of rank {self.rank} could not be written: {error}"
        if self._ended_early:
            text += f"; it ends early, at trainer.profile_max_gb ({self.max_gb:g})"
        self._tell(step, text, time.perf_counter() - started)

    def _tell(self, step: int, text: str, seconds: float) -> None:
        logging.getLogger(__name__).info("step %d: %s", step, text)
        self.report(step, text, {"text": text, "seconds": seconds})


class ProfileSettings(Protocol):
    """Those of a `trainer` section."""

    @property
    def run_dir(self) -> str:
        """The run's folder."""

    @property
    def profile_steps(self) -> list[int]:
        """Steps that are recorded."""

    @property
    def profile_max_gb(self) -> float:
        """Growth of host memory at which a trace ends."""


def make_profiler(
    settings: ProfileSettings,
    context: ParallelContext,
    *,
    say: Callable[[str], None],
    records: Records | None,
) -> StepProfiler:
    """This rank's profiler; rank 0, which has `records`, tells of it."""

    def report(step: int, text: str, details: dict[str, Any]) -> None:
        if records is not None:
            say(f"profile    step {step}: {text}")
            records.event("profiled", step, **details)

    return StepProfiler(
        steps=frozenset(settings.profile_steps),
        folder=Path(settings.run_dir) / "profile",
        rank=context.rank,
        device=context.device,
        max_gb=settings.profile_max_gb,
        report=report,
    )


def _memory_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
