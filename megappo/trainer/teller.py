"""How a run tells what happens: a line on the screen, an event, and a text for its loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.errors import GuardStop
from megappo.loggers import Logger
from megappo.trainer.records import Records


@dataclass(frozen=True, kw_only=True)
class Teller:
    """Loggers and records are rank 0's alone; on other ranks nothing is told."""

    say: Callable[[str], None]
    """Puts a line on the user's screen, from rank 0."""
    loggers: Sequence[Logger]
    records: Records | None

    def event(self, kind: str, step: int, **details: Any) -> None:
        """A line in `events.jsonl`."""
        if self.records is not None:
            self.records.event(kind, step, **details)

    def announce(self, kind: str, step: int, text: str, **details: Any) -> None:
        """An event, a line on the screen, and a text for loggers that have a place for it."""
        self.say(f"{kind:<10} step {step}: {text}")
        self.event(kind, step, **(details or {"text": text}))
        for logger in self.loggers:
            logger.note(step, f"{kind}: {text}")

    def tell_start(
        self, step: int, checkpoint: Path | None, *, changes: Sequence[str], restarts: int
    ) -> None:
        """The event `resumed`; or `restarted`, where the starts before left no checkpoint.

        Args:
            step: finished.
            checkpoint: that the run goes on from, if there is any.
            changes: since it was written.
            restarts: by torchrun or Slurm.
        """
        if checkpoint is not None:
            path, told = str(checkpoint), list(changes)
            self.event("resumed", step, path=path, changes=told, restarts=restarts)
        elif restarts:
            self.event("restarted", step, restarts=restarts)

    @contextmanager
    def guard_stops(self, step: int) -> Iterator[None]:
        """Announces the `GuardStop` of a block in which nobody else does; it goes on its way."""
        try:
            yield
        except GuardStop as stop:
            reason = str(stop).removeprefix(f"step {step}: ")
            self.announce("guard", step, f"stop: {reason}", action="stop", reason=reason)
            raise

    def forget(self, first_step: int) -> None:
        """Steps from here on will be logged again."""
        for logger in self.loggers:
            logger.rewind(first_step)

    def close(self) -> None:
        """Ends the loggers; safe after an error."""
        for logger in self.loggers:
            logger.close()
