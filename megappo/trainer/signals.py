"""What SIGTERM, SIGINT and SIGUSR1 (Slurm's warning) ask of a run."""

from __future__ import annotations

import signal
import time
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

SAME_REQUEST_S = 2.0
"""Slurm signals every process of a step, and the launcher passes the signal on: a rank may get one
request twice."""


class StopSignals:
    """The first asks for a stop before or after an update; a later second one ends at once."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._since = 0.0

    def catch(self) -> None:
        """Takes the place of the signals' own effects."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    @property
    def name(self) -> str:
        """Of the signal that came first; empty if none did."""
        return "" if self._first is None else signal.Signals(self._first).name

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first, self._since = number, now
        elif now - self._since > SAME_REQUEST_S and number != signal.SIGUSR1:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
