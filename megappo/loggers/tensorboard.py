"""`tensorboard/`: every metric as a scalar. A resumed run hides what lies beyond its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from megappo.loggers import LoggerSettings


class TensorBoardLogger:
    """Wraps PyTorch's SummaryWriter."""

    def __init__(self, settings: LoggerSettings) -> None:
        self._folder = str(settings.run_dir / "tensorboard")
        self._open(settings.first_step)

    def _open(self, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self._folder, purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds one scalar a metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def note(self, step: int, text: str) -> None:
        """Adds a sentence to the text tab, under `events`."""
        self._writer.add_text("events", text, step)
        self._writer.flush()

    def rewind(self, first_step: int) -> None:
        """Hides the steps that will come again."""
        self._writer.close()
        self._open(first_step)

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()
