"""Where a run's numbers go. Each logger is one file and one registration line here.

Only rank 0 makes loggers. A step's metrics are already reduced over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

from megappo.config.tracking import TrackingSection
from megappo.registry import Registry


@dataclass(frozen=True, kw_only=True)
class LoggerSettings:
    """What a logger may need to know."""

    run_dir: Path
    first_step: int
    """Steps from here on are new; what an earlier, longer run wrote beyond it is dropped."""
    total_steps: int
    terminal: TextIO
    """The user's screen: the process's own stdout goes to a log file."""
    tracking: TrackingSection = field(default_factory=TrackingSection)
    """Names for wandb and mlflow."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Every key of the run's config, dotted -> JSON value; trackers show it beside the numbers."""

    @property
    def run_name(self) -> str:
        """What trackers call the run."""
        return self.tracking.experiment_name or self.run_dir.resolve().name


class Logger(Protocol):
    """Takes one mapping a step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes a step's metrics, `section/name` -> number."""

    def note(self, step: int, text: str) -> None:
        """Takes a sentence about a step; screen and `events.jsonl` have it from elsewhere."""

    def rewind(self, first_step: int) -> None:
        """Steps from here on will come again, with other numbers."""

    def close(self) -> None:
        """Flushes and lets go of files."""


LOGGERS: Registry[Callable[[LoggerSettings], Logger]] = Registry("logger")


@LOGGERS.register("console")
def _console(settings: LoggerSettings) -> Logger:
    from megappo.loggers.console import ConsoleLogger

    return ConsoleLogger(settings)


@LOGGERS.register("jsonl")
def _jsonl(settings: LoggerSettings) -> Logger:
    from megappo.loggers.jsonl import JsonlLogger

    return JsonlLogger(settings)


@LOGGERS.register("tensorboard")
def _tensorboard(settings: LoggerSettings) -> Logger:
    from megappo.loggers.tensorboard import TensorBoardLogger

    return TensorBoardLogger(settings)


@LOGGERS.register("wandb")
def _wandb(settings: LoggerSettings) -> Logger:
    from megappo.loggers.wandb import WandbLogger

    return WandbLogger(settings)


@LOGGERS.register("mlflow")
def _mlflow(settings: LoggerSettings) -> Logger:
    from megappo.loggers.mlflow import MlflowLogger

    return MlflowLogger(settings)
