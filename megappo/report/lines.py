"""JSON lines of a run that may still be writing them, or was killed in the middle of one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Every whole object of a file; what is left out is said in `notes`. A missing file is empty.

    The last line may be torn. Any other line that is no JSON object is damage, counted and left
    out too: a report on what there is beats none.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    found, bad = [], 0
    for line in lines[:-1]:
        if (row := _object(line)) is None:
            bad += 1
        else:
            found.append(row)
    if lines[-1] and (row := _object(lines[-1])) is not None:
        found.append(row)
    elif lines[-1]:
        notes.append(f"{path.name}: the last line is torn and left out")
    if bad:
        notes.append(f"{path.name}: {bad} damaged lines are left out")
    return found


def _object(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def spread(values: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the values, evenly spaced, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    if most == 1:
        return [values[-1]]
    last = len(values) - 1
    return [values[round(i * last / (most - 1))] for i in range(most)]
