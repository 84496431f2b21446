"""A logger that may fail without ending the run: told once, then silent until the next start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from megappo.loggers import Logger

Report = Callable[[int, str], None]
"""Takes a step and a sentence."""


class ContainedLogger:
    """Wraps a logger; whatever it raises, from its start on, is reported and switches it off.

    Any kind of error is meant: disks fill up, servers go away, packages have faults, and hours of
    training must not be lost over a line of numbers. The traceback is in rank 0's log. It is not
    tried again, since a half-written line must stay the last one.

    Args:
        name: as in `loggers`.
        make: starts the logger.
        report: tells the user and the run's events.
        first_step: where the run begins, for a failure at the start.
    """

    def __init__(
        self, name: str, make: Callable[[], Logger], *, report: Report, first_step: int
    ) -> None:
        self._name, self._report = name, report
        self._step = first_step
        self._logger: Logger | None = None

        def start() -> None:
            self._logger = make()

        self._guarded(start)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Passes a step's metrics on."""
        if (logger := self._logger) is not None:
            self._step = step
            self._guarded(lambda: logger.log(step, metrics))

    def note(self, step: int, text: str) -> None:
        """Passes a sentence on."""
        if (logger := self._logger) is not None:
            self._guarded(lambda: logger.note(step, text))

    def rewind(self, first_step: int) -> None:
        """Passes on that steps will come again."""
        if (logger := self._logger) is not None:
            self._guarded(lambda: logger.rewind(first_step))

    def close(self) -> None:
        """Ends the logger, if it works."""
        if (logger := self._logger) is not None:
            self._guarded(logger.close)
        self._logger = None

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._logger = None
            logging.getLogger(__name__).exception("logger %s failed", self._name)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._report(
                self._step,
                f"the logger {self._name!r} failed and is off until the run starts again: {reason}",
            )
