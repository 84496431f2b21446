"""A run's loggers, none of which can stop it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from megappo.loggers import LOGGERS, Logger, LoggerSettings
from megappo.loggers.contained import ContainedLogger
from megappo.trainer.records import Records


def contained_loggers(
    names: Sequence[str],
    settings: LoggerSettings,
    *,
    say: Callable[[str], None],
    records: Records,
) -> list[Logger]:
    """The named loggers; what goes wrong in one is said on the screen and in events.jsonl."""

    def report(step: int, text: str) -> None:
        say(f"warning    step {step}: {text}")
        records.event("logger_failed", step, text=text)

    return [
        ContainedLogger(
            name, partial(LOGGERS[name], settings), report=report, first_step=settings.first_step
        )
        for name in names
    ]
