"""The screen: a live line with a progress bar on a terminal, one plain line a step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megappo.loggers import LoggerSettings

COLUMNS = (
    ("score", "critic/score/mean", "{:.3f}"),
    ("val", "val/score/mean", "{:.3f}"),
    ("loss", "rm/loss", "{:.4f}"),
    ("loss", "sft/loss", "{:.4f}"),
    ("accuracy", "rm/accuracy", "{:.3f}"),
    ("margin", "rm/margin", "{:.3f}"),
    ("val loss", "val/loss", "{:.4f}"),
    ("val accuracy", "val/accuracy", "{:.3f}"),
    ("kl", "actor/ppo_kl", "{:.4f}"),
    ("ref kl", "actor/kl_loss", "{:.4f}"),
    ("clip", "actor/pg_clipfrac", "{:.3f}"),
    ("len", "response_length/mean", "{:.1f}"),
    ("tok/s", "perf/tokens_per_s", "{:.0f}"),
    ("s/step", "timing_s/step", "{:.1f}"),
)


class ConsoleLogger:
    """Shows step, score, KL, tokens a second and time left."""

    def __init__(self, settings: LoggerSettings) -> None:
        self._first, self._total = settings.first_step, settings.total_steps
        self._started = time.monotonic()
        self._console = Console(file=settings.terminal, soft_wrap=True, highlight=False)
        self._progress: Progress | None = None
        if settings.terminal.isatty():
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left {task.fields[left]}"),
                console=self._console,
            )
            self._task = self._progress.add_task(
                "training", total=self._total, completed=self._first - 1, left="?"
            )
            self._progress.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints a step; the bar moves along below."""
        shown = [
            f"{label} {form.format(metrics[key])}" for label, key, form in COLUMNS if key in metrics
        ]
        left = self._left(step)
        line = f"step {step:>4}/{self._total}  " + "  ".join(shown)
        if self._progress is None:
            self._console.print(f"{line}  left {left}")
            return
        self._console.print(line)
        self._progress.update(self._task, completed=step, left=left)

    def note(self, step: int, text: str) -> None:
        """Nothing: the run itself writes its warnings on the screen."""

    def rewind(self, first_step: int) -> None:
        """Nothing: lines stay, and the bar goes back with the next step."""

    def close(self) -> None:
        """Takes the bar off the screen."""
        if self._progress is not None:
            self._progress.stop()

    def _left(self, step: int) -> str:
        done = step - self._first + 1
        if done < 1:
            return "?"
        seconds = (time.monotonic() - self._started) / done * max(0, self._total - step)
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes}:{rest:02d}"
