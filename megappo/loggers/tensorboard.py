"""`tensorboard/`: every metric as a scalar. A resumed run hides what lies beyond its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from megappo.loggers import LoggerSettings


class TensorBoardLogger:
    """Wraps PyTorch's SummaryWriter."""

    def __init__(self, settings: LoggerSettings) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(settings.run_dir / "tensorboard"), purge_step=settings.first_step
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds one scalar a metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()
