"""What a report shows of one run's folder: curves, events, state. Only reads, and reads anything.

A run may be running, finished or dead. Long runs are thinned to `MOST_STEPS` points a curve; what
was left out is said in `notes`, which the page shows.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megappo.errors import UserError
from megappo.report.lines import read_lines, spread

MOST_STEPS = 2000
MOST_EVENTS = 2000
EVENT_CHARS = 1000

_FILES = ("metrics.jsonl", "config.yaml", "events.jsonl", "status.json")
"""One of these makes a folder a run's."""


@dataclass(kw_only=True)
class RunFolder:
    """One run, as JSON values."""

    path: Path
    name: str
    state: str
    """in words, for people"""
    steps: list[int]
    metrics: dict[str, list[float | None]]
    """`section/name` -> a value for each of `steps`; None where a step has none"""
    events: list[dict[str, Any]]
    """`time` (text), `step`, `kind`, `text`"""
    notes: list[str] = field(default_factory=list)
    """what is left out, and why"""


def read_run(path: Path) -> RunFolder:
    """Reads a run's folder.

    Raises:
        UserError: it is no run's folder.
    """
    if not path.is_dir():
        raise UserError(f"{path} is no folder: give the folder of a run (trainer.run_dir)")
    if not any((path / name).exists() for name in _FILES):
        raise UserError(
            f"{path} is no run's folder: it has none of {', '.join(_FILES)}; give what "
            "trainer.run_dir was"
        )
    notes: list[str] = []
    rows = _rows(read_lines(path / "metrics.jsonl", notes))
    kept = spread(rows, MOST_STEPS)
    if len(kept) < len(rows):
        notes.append(f"curves show {len(kept)} of {len(rows)} steps, evenly spaced")
    if not rows:
        notes.append("no step is in metrics.jsonl yet")
    events = [_event(row) for row in read_lines(path / "events.jsonl", notes)]
    if len(events) > MOST_EVENTS:
        notes.append(f"the newest {MOST_EVENTS} of {len(events)} events are shown")
    return RunFolder(
        path=path,
        name=path.resolve().name,
        state=_state(path, rows),
        steps=[row["step"] for row in kept],
        metrics=_columns(kept),
        events=events[-MOST_EVENTS:],
        notes=notes,
    )


def _rows(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a step, the last one written, by step."""
    by_step = {row["step"]: row for row in lines if isinstance(row.get("step"), int)}
    return [by_step[step] for step in sorted(by_step)]


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    names = sorted({name for row in rows for name in row} - {"step"})
    return {name: [_number(row.get(name)) for row in rows] for name in names}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.7g}")


def _event(row: Mapping[str, Any]) -> dict[str, Any]:
    """An event's own sentence, or its details as they stand."""
    details = {k: v for k, v in row.items() if k not in ("time", "step", "kind")}
    if row.get("kind") == "guard" and "text" not in row:
        parts = (row.get("reason"), row.get("done"), row.get("detail"))
        text = f"{row.get('action')}: " + "; ".join(str(part) for part in parts if part)
    else:
        text = str(row.get("text") or ", ".join(f"{k} {v}" for k, v in details.items()))
    when, step = row.get("time"), row.get("step")
    return {
        "time": _clock(when) if isinstance(when, int | float) else "",
        "step": step if isinstance(step, int) else None,
        "kind": str(row.get("kind", "")),
        "text": text[:EVENT_CHARS],
    }


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _state(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    done = f"{rows[-1]['step']} steps" if rows else "no steps"
    try:
        status = json.loads((path / "status.json").read_text())
        phase, step, since = str(status["phase"]), int(status["step"]), float(status["since"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{done}; no status.json says whether it ended"
    if phase == "done":
        return f"{done}; done at {_clock(since)}"
    return f"{done}; not done: in step {step}, phase {phase}, since {_clock(since)}"
