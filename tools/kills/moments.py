"""Moments of a run at which something is killed, and how each is waited for from outside.

A phase is read from `status.json`; what happens to checkpoints in files, from the folder itself.
After the kill `was_hit` says, by what the run has left behind, whether it came in its moment: a
process that waits for a time slice may be killed a little later than was meant.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megappo.checkpoint import layout
from tools.kills.folder_events import IN_CREATE, IN_MOVED_TO, FolderEvents
from tools.kills.runs import POLL_S, WatchedRun


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When to kill. Either phases, or an event of the folder of checkpoints."""

    phases: tuple[str, ...] = ()
    """of `status.json`, of which one is meant"""
    event: tuple[int, str] | None = None
    """kind of inotify, and a pattern of names"""
    length_s: float = 0.0
    """the kill comes up to so much later; for phases, if the metrics do not tell their length"""
    once: bool = False
    """It comes once a start, so that it cannot be waited for a second time."""


MOMENTS = {
    "start": Moment(phases=("start",), length_s=6.0, once=True),
    "resume": Moment(phases=("resume",), length_s=0.2, once=True),
    "generate": Moment(phases=("generate",)),
    "log_probs": Moment(phases=("log_probs",)),
    "ref": Moment(phases=("ref",)),
    "values": Moment(phases=("values",)),
    "update_critic": Moment(phases=("update_critic",)),
    "update_actor": Moment(phases=("update_actor",)),
    "sync": Moment(phases=("sync",), length_s=0.01),
    "validate": Moment(phases=("validate",)),
    "save": Moment(phases=("save",), length_s=0.1),
    "export": Moment(phases=("export",), length_s=0.05, once=True),
    "writing": Moment(event=(IN_CREATE, r"step_\d+\.saving"), length_s=0.15),
    "renamed": Moment(event=(IN_MOVED_TO, r"step_\d+")),
    "removing": Moment(event=(IN_MOVED_TO, r"step_\d+\.removed")),
}
"""`writing`: files of a checkpoint are written, while training goes on or waits; `renamed`: it has
its name, and `latest` does not name it yet; `removing`: an old one is being deleted."""


def wait_for(
    moment: Moment,
    run: WatchedRun,
    rng: random.Random,
    lengths: Mapping[str, float],
    *,
    skip: int,
    limit_s: float,
) -> str:
    """Waits for the moment and a random part of its length.

    Args:
        moment: of `MOMENTS`.
        run: which has just been started, or goes on after the kill of an engine.
        rng: for the part of the length.
        lengths: seconds of a phase, as far as the metrics tell.
        skip: so many times the moment is let pass.
        limit_s: to wait for it.

    Returns:
        Nothing, or why it did not come: `ended` or `hangs`.
    """
    deadline = time.monotonic() + limit_s
    if moment.event is None:
        why = _wait_for_phase(moment, run, skip=skip, deadline=deadline)
    else:
        why = _wait_for_event(moment.event, run, skip=skip, deadline=deadline)
    if not why:
        found = [lengths[name] for name in moment.phases if name in lengths]
        if length_s := sum(found) or moment.length_s:
            time.sleep(rng.uniform(0.0, 0.9 * length_s))
    return why


def was_hit(moment: Moment, phase: str, folder: Path) -> bool:
    """Whether the kill came in its moment; asked once all processes are gone.

    Args:
        moment: that was meant.
        phase: in `status.json` right after the kill.
        folder: of checkpoints.
    """
    if moment.event is None:
        return phase in moment.phases
    kind, pattern = moment.event
    if kind == IN_CREATE or "removed" in pattern:
        return any(re.fullmatch(pattern, path.name) for path in folder.iterdir())
    steps, latest = layout.complete_steps(folder), folder / layout.LATEST
    return bool(steps) and (
        not latest.exists() or layout.step_name(steps[-1]) > latest.read_text().strip()
    )


def _wait_for_phase(moment: Moment, run: WatchedRun, *, skip: int, deadline: float) -> str:
    seen = run.status() if skip else None
    while time.monotonic() < deadline:
        if not run.runs:
            return "ended"
        now = run.status()
        if now[1] in moment.phases and now != seen:
            if not skip:
                return ""
            seen, skip = now, skip - 1
        time.sleep(POLL_S)
    return "hangs"


def _wait_for_event(event: tuple[int, str], run: WatchedRun, *, skip: int, deadline: float) -> str:
    folder = layout.folder_of(run.run_dir)
    kind, pattern = event[0], re.compile(event[1])
    is_saving = kind == IN_CREATE
    goes_first = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_FIFO
    with FolderEvents(folder) as events:
        while time.monotonic() < deadline:
            if not run.runs:
                return "ended"
            # A sleeping process wakes too late for what lasts a millisecond, if it has to queue.
            spins = not is_saving and not goes_first and any(folder.glob("*.saving"))
            if events.wait(kind, pattern, 0.2, spins=spins):
                if not skip:
                    return ""
                skip -= 1
    return "hangs"
