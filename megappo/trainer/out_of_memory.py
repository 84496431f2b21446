"""One rank without device memory: what the others can learn of it, and what a restart can.

A rank that finds no memory stops in the middle of a forward or backward pass. Where the others wait
for it in a collective of that pass (tensor, pipeline, context and expert parallelism, overlapped
gradients, FSDP) nobody can call them back: the run ends, and this rank leaves a note by which the
next start makes forward passes smaller. In pure data parallelism a pass has no collectives, so the
ranks agree after it, and go on together (`distributed/memory_agreement.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.distributed.memory_agreement import MemoryLost
from megappo.trainer.adjustments import Adjustments

__all__ = ["MemoryLost", "OutOfMemoryNotes"]


@dataclass(frozen=True)
class OutOfMemoryNotes:
    """Files `out_of_memory_rank*.json` of a run's folder."""

    run_dir: Path
    rank: int

    def note(self, adjustments: Adjustments, step: int, text: str) -> None:
        """Writes down that this rank ended for want of memory, and with which settings."""
        found = {
            "rank": self.rank,
            "step": step,
            "text": f"rank {self.rank}, before the restart: {text}",
            "halvings": adjustments.halvings,
            "offloads_all": adjustments.offloads_all,
        }
        path = self.run_dir / f"out_of_memory_rank{self.rank:05d}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(found))
        new.replace(path)

    def take(self) -> dict[str, Any] | None:
        """The note with the smallest forward passes, if there is any; all are removed."""
        paths = sorted(self.run_dir.glob("out_of_memory_rank*.json"))
        notes: list[dict[str, Any]] = [json.loads(path.read_text()) for path in paths]
        for path in paths:
            path.unlink()
        return max(notes, key=lambda note: note["halvings"], default=None)
