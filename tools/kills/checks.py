"""What must hold of a run's folder after a kill, and of one that was killed and has finished."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.checkpoint import layout
from megappo.errors import CheckpointError
from tools.kills.runs import WatchedRun, differences, digests

_OF_STARTS = ("resumed", "pushed", "saved", "exported", "engine_restarted")
"""Events of a start or a kill: a killed run has others of them, or more."""
_TEMPORARY = (".saving", ".replaced", ".removed", ".tmp", ".new")


@dataclass(frozen=True, kw_only=True)
class Undisturbed:
    """A run without kills: what it left, and what each of its checkpoints held."""

    run_dir: Path
    checkpoints: Mapping[int, Mapping[str, str]]
    """step -> digest of each file"""

    @staticmethod
    def watched(run: WatchedRun, timeout_s: float) -> Undisturbed:
        """Of a run that has just been started, once it is over; reads checkpoints as they come."""
        folder = layout.folder_of(run.run_dir)
        found: dict[int, Mapping[str, str]] = {}
        while True:
            ended = not run.runs
            for step in layout.complete_steps(folder):
                if step not in found:
                    found[step] = digests(folder / layout.step_name(step))
            if ended:
                break
            time.sleep(0.05)
        code = run.wait(timeout_s)
        assert code == 0, f"{run.run_dir} ended with {code}: {run.screen[-3000:]}"
        return Undisturbed(run_dir=run.run_dir, checkpoints=found)


def problems_after_kill(folder: Path, undisturbed: Undisturbed, *, newest: int) -> list[str]:
    """What is wrong with the checkpoints of a run none of whose processes is left.

    Args:
        folder: of its checkpoints.
        undisturbed: whose checkpoints they must equal, file by file.
        newest: step of `latest` after the kill before; it must not go back.
    """
    try:
        latest = layout.latest(folder)
    except CheckpointError as error:
        return [f"latest: {error}"]
    step = 0 if latest is None else int(layout.read_state(latest)["step"])
    problems = [] if step >= newest else [f"latest went back from step {newest} to {step}"]
    # Every folder that counts as complete, also one that `latest` does not name.
    for step in layout.complete_steps(folder):
        found = digests(folder / layout.step_name(step))
        wanted = undisturbed.checkpoints.get(step, {})
        wrong = sorted(k for k in found.keys() | wanted.keys() if found.get(k) != wanted.get(k))
        if wrong:
            problems.append(f"checkpoint of step {step}: {', '.join(wrong[:5])}")
    return problems


def problems_at_end(run_dir: Path, undisturbed: Undisturbed) -> list[str]:
    """Where a run that has finished differs from the undisturbed one; nothing may."""
    problems = differences(run_dir, undisturbed.run_dir)
    found, wanted = (_events(folder) for folder in (run_dir, undisturbed.run_dir))
    problems += [f"event only here: {event}" for event in sorted(found - wanted)]
    problems += [f"event missing: {event}" for event in sorted(wanted - found)]
    names, wanted_names = (_names(folder) for folder in (run_dir, undisturbed.run_dir))
    problems += [f"file only here: {name}" for name in sorted(names - wanted_names)]
    problems += [f"file missing: {name}" for name in sorted(wanted_names - names)]
    return problems + [f"left behind: {n}" for n in sorted(names) if n.endswith(_TEMPORARY)]


def _events(run_dir: Path) -> set[str]:
    """Events that do not depend on how often the run was started, without their times.

    A step that is repeated after a kill may tell its events again, so they are a set.
    """
    events: list[dict[str, Any]] = [
        json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()
    ]
    return {
        json.dumps({k: v for k, v in event.items() if k != "time"}, sort_keys=True)
        for event in events
        if event["kind"] not in _OF_STARTS
    }


def _names(run_dir: Path) -> set[str]:
    """All files but those of libraries, one a start: logs and TensorBoard's."""
    return {
        str(path.relative_to(run_dir))
        for path in run_dir.rglob("*")
        if path.is_file() and path.relative_to(run_dir).parts[0] not in ("logs", "tensorboard")
    }
