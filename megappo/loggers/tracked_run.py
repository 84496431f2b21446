"""A run's identity in a tracker that cannot take numbers back, as wandb and mlflow.

The id and the last step that the tracker was told stand in a small file of the run's folder. A
resumed run, or one that a guard took back, goes on under the same id, and steps that the tracker
has already are not told again. A run that starts anew in the folder gets a new id.
"""

from __future__ import annotations

import json
import os
from pathlib import Path


class TrackedRun:
    """Id and last step in one tracker.

    Args:
        path: the file.
        place: where the tracker keeps the run; another place needs another id.
        first_step: as in `LoggerSettings`; 0 for a run that does not go on from a checkpoint.
    """

    def __init__(self, path: Path, *, place: str, first_step: int) -> None:
        self._path, self._place = path, place
        self.id = ""
        self.last_step = -1
        if first_step > 0 and path.exists():
            found = json.loads(path.read_text())
            if found["place"] == place:
                self.id, self.last_step = found["id"], found["last_step"]

    @property
    def is_new(self) -> bool:
        """Whether the tracker has to make a run."""
        return not self.id

    def begin(self, run_id: str) -> None:
        """Takes the id of a new run."""
        self.id = run_id
        self._write()

    def has(self, step: int) -> bool:
        """Whether the tracker was told this step already."""
        return step <= self.last_step

    def found(self, step: int) -> None:
        """Takes what the tracker itself says it has: a kill may lie between it and `told`."""
        self.last_step = max(self.last_step, step)

    def told(self, step: int) -> None:
        """Notes that the tracker has the step."""
        self.last_step = step
        self._write()

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        values = {"id": self.id, "place": self._place, "last_step": self.last_step}
        with new.open("w") as file:
            file.write(json.dumps(values) + "\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)
