"""`status.json` in the run's folder: what the run is doing now, for people and tools that watch.

Metrics tell of a step once it is over. A run that hangs, or whose step takes an hour, is looked up
here: the step, its phase, and since when. One small file, replaced whole at each change, so that
nobody reads half of it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

NAME = "status.json"


class Status:
    """Keeps the file up to date; rank 0's alone, on other ranks it writes nothing."""

    def __init__(self, run_dir: Path | None) -> None:
        """`run_dir` is None on ranks that write nothing."""
        self._path = None if run_dir is None else run_dir / NAME

    def enter(self, phase: str, step: int) -> None:
        """From now on the run works on `step`, in this phase.

        Args:
            phase: one of `stopwatch.PHASES`, or `report`, `profile`, `validate`, `resume`, `save`,
                `export`, `done`.
            step: number of the step that is worked on, the last one after it is done.
        """
        if self._path is None:
            return
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"step": step, "phase": phase, "since": time.time()}) + "\n")
        new.replace(self._path)
