"""`status.json` in the run's folder: what the run is doing now, for people and tools that watch.

Metrics tell of a step once it is over. A run that hangs, or whose step takes an hour, is looked up
here: the step, its phase, and since when. One small file, replaced whole at each change, so that
nobody reads half of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from megappo.trainer.best_effort import BestEffort

NAME = "status.json"


class Status:
    """Keeps the file up to date; rank 0's alone, on other ranks it writes nothing.

    Args:
        run_dir: the folder; None on ranks that write nothing.
        say: puts a line on the user's screen, of a file that cannot be written.
    """

    def __init__(self, run_dir: Path | None, *, say: Callable[[str], None]) -> None:
        self._path = None if run_dir is None else run_dir / NAME
        self._best_effort = BestEffort(say)

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
        text = json.dumps({"step": step, "phase": phase, "since": time.time()}) + "\n"
        with self._best_effort.writing(NAME):
            new.write_text(text)
            new.replace(self._path)
