"""A disk, a logger and a rank of the world for tests of the loops around steps."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megappo.checkpoint.store import Saved
from megappo.config.sections import CheckpointSection
from megappo.errors import SaveError
from megappo.trainer.records import Records
from megappo.trainer.saver import Saver
from megappo.trainer.teller import Teller


@dataclass
class MemoryStore:
    """In place of a `CheckpointStore`: keeps the small states, as JSON text."""

    folder: Path
    states: dict[int, str] = field(default_factory=dict)
    problem: Exception | None = None
    """what each save meets"""
    saving_step: int | None = None

    def begin(self, step: int, models: Any, state: Any) -> None:
        if self.problem is not None:
            raise self.problem
        self.states[step], self.saving_step = json.dumps(state), step

    def poll(self, *, wait: bool) -> Saved:
        step, self.saving_step = self.saving_step, None
        assert step is not None
        return Saved(step=step, path=self.folder, num_bytes=0, write_s=0.0)

    def tidy(self) -> None:
        pass

    def load(self, checkpoint: Path, models: Any, *, seed: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.states[int(checkpoint.name)])
        return found


@dataclass
class MemoryLogger:
    """Keeps what it is told."""

    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def log(self, step: int, metrics: Any) -> None:
        assert step not in self.rows
        self.rows[step] = {k: v for k, v in metrics.items() if not k.startswith("timing_s/")}

    def note(self, step: int, text: str) -> None:
        self.notes.append(text)

    def rewind(self, first_step: int) -> None:
        self.rows = {step: row for step, row in self.rows.items() if step < first_step}

    def close(self) -> None:
        pass


@dataclass
class Place:
    """What surrounds one run, and outlives it."""

    run_dir: Path
    alone: SimpleNamespace
    stop: str = ""
    """why it is to stop"""

    def __post_init__(self) -> None:
        self.screen: list[str] = []
        self.store = MemoryStore(self.run_dir / "checkpoints")
        self.logger = MemoryLogger()
        self.context = SimpleNamespace(
            world_group=self.alone.data_group, is_main=True, rank=0, world_size=1
        )
        records = Records(
            self.run_dir, rollouts_per_step=0, tokens_per_sample=0, say=self.screen.append
        )
        self.teller = Teller(say=self.screen.append, loggers=[self.logger], records=records)

    def saver(self, state: Any, **settings: Any) -> Saver:
        """A real one, which saves every second step."""
        return Saver(
            store=self.store, settings=CheckpointSection(**settings), models={},
            context=self.context, ranks_on_node=1, save_freq=2, state=state,
            say=self.screen.append, event=self.teller.event,
        )  # fmt: skip

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.run_dir / "events.jsonl"
        found = [json.loads(line) for line in path.read_text().splitlines()]
        return [{k: v for k, v in e.items() if k != "time"} for e in found if e["kind"] == kind]


FULL = SaveError("the disk is full")
