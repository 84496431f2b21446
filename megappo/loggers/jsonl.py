"""`metrics.jsonl`: one JSON object a step, `step` first, names sorted.

On resume, lines beyond the checkpoint are dropped, so that no step stands twice. A half-written
last line, left by a killed process, is dropped too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from megappo.loggers import LoggerSettings


class JsonlLogger:
    """Appends a line a step and flushes it."""

    def __init__(self, settings: LoggerSettings) -> None:
        self._path = settings.run_dir / "metrics.jsonl"
        keep_before(self._path, settings.first_step)
        self._file = self._path.open("a")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes a step's metrics; non-finite numbers become null, which JSON has."""
        finite = {k: (v if abs(v) < float("inf") else None) for k, v in sorted(metrics.items())}
        self._file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        self._file.flush()

    def note(self, step: int, text: str) -> None:
        """Nothing: sentences stand in `events.jsonl`."""

    def rewind(self, first_step: int) -> None:
        """Drops the lines of steps that will come again."""
        self._file.close()
        keep_before(self._path, first_step)
        self._file = self._path.open("a")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_jsonl(path: Path) -> list[dict[str, object]]:
    """Whole lines of a file; a cut last line is left out, any other bad line is an error."""
    lines = path.read_text().split("\n")
    whole, rest = lines[:-1], lines[-1]
    del rest  # what follows the last newline was never finished
    return [json.loads(line) for line in whole]


def keep_before(path: Path, first_step: int) -> None:
    """Drops lines of steps >= first_step, by way of a temporary file."""
    if not path.exists():
        return
    kept = [row for row in read_jsonl(path) if int(str(row["step"])) < first_step]
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
