"""Weights & Biases, online or offline; what it writes lies in `wandb/` of the run's folder.

Its step is ours. It takes no step twice, so steps that it has already are left out: after a
roll-back by a guard the numbers of the first try stay. Left out too: sentences, which stand in
`events.jsonl`, and its copies of stdout, of the program and of the repository.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from megappo.loggers import LoggerSettings
from megappo.loggers.tracked_run import TrackedRun


class WandbLogger:
    """Logs a step's metrics as one committed row."""

    def __init__(self, settings: LoggerSettings) -> None:
        import wandb

        names = settings.tracking
        self._tracked = TrackedRun(
            settings.run_dir / "wandb_run.json",
            place=names.project_name,
            first_step=settings.first_step,
        )
        if self._tracked.is_new:
            self._tracked.begin(secrets.token_hex(4))
        self._end_service = wandb.teardown
        self._run = wandb.init(
            project=names.project_name,
            name=settings.run_name,
            id=self._tracked.id,
            resume="allow",
            dir=str(settings.run_dir),
            mode=None if names.wandb_mode == "auto" else names.wandb_mode,
            config=dict(settings.config),
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True
            ),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a row, unless the run has one of this step."""
        if self._tracked.has(step):
            return
        self._run.log(dict(metrics), step=step, commit=True)
        self._tracked.told(step)

    def note(self, step: int, text: str) -> None:
        """Nothing: sentences stand in `events.jsonl`."""

    def rewind(self, first_step: int) -> None:
        """Nothing: rows cannot be taken back, and `log` adds no step twice."""

    def close(self) -> None:
        """Waits until everything is written, online until it is sent."""
        self._run.finish()
        self._end_service()  # `finish` alone returns before the last rows are in the file.
