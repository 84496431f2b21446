"""MLflow: by default its file store, `mlruns/` in the run's folder; or a server, by its URI.

A metric keeps every value that it is told, so steps that it has already are left out: after a
roll-back by a guard the numbers of the first try stay. Left out: sentences, which stand in
`events.jsonl`, and artifacts.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from megappo.loggers import LoggerSettings
from megappo.loggers.tracked_run import TrackedRun

METRICS_A_CALL, PARAMS_A_CALL, PARAM_CHARS = 1000, 100, 6000
"""MLflow's own limits of one request."""

_STEP_TIME = "timing_s/step"
"""A metric that a run of any kind has in every step."""

T = TypeVar("T")


class MlflowLogger:
    """Logs a step's metrics in one request."""

    def __init__(self, settings: LoggerSettings) -> None:
        _choose_switches()
        from mlflow import MlflowClient

        uri = settings.tracking.mlflow_uri or (settings.run_dir / "mlruns").absolute().as_uri()
        project = settings.tracking.project_name
        self._client = MlflowClient(tracking_uri=uri)
        self._tracked = TrackedRun(
            settings.run_dir / "mlflow_run.json",
            place=f"{uri} {project}",
            first_step=settings.first_step,
        )
        if self._tracked.is_new:
            self._begin(project, settings)
        else:
            self._client.update_run(self._tracked.id, status="RUNNING")
            self._tracked.found(self._last_step())

    def _begin(self, project: str, settings: LoggerSettings) -> None:
        from mlflow.entities import Param

        client = self._client
        found = client.get_experiment_by_name(project)
        experiment = client.create_experiment(project) if found is None else found.experiment_id
        run = client.create_run(experiment, run_name=settings.run_name)
        self._tracked.begin(run.info.run_id)
        params = [Param(_name(k), str(v)[:PARAM_CHARS]) for k, v in settings.config.items()]
        for some in _slices(params, PARAMS_A_CALL):
            self._client.log_batch(self._tracked.id, params=some)

    def _last_step(self) -> int:
        """Newest step of one metric that every step has; -1 if there is none yet."""
        names = self._client.get_run(self._tracked.id).data.metrics
        of_all_steps = [n for n in sorted(names) if not n.startswith("val/")]
        if not of_all_steps:
            return -1
        name = _STEP_TIME if _STEP_TIME in names else of_all_steps[0]
        return max(m.step for m in self._client.get_metric_history(self._tracked.id, name))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a value to each metric, unless the run has this step."""
        from mlflow.entities import Metric

        if self._tracked.has(step):
            return
        now_ms = int(time.time() * 1000)
        values = [Metric(_name(k), float(v), now_ms, step) for k, v in metrics.items()]
        for some in _slices(values, METRICS_A_CALL):
            self._client.log_batch(self._tracked.id, metrics=some)
        self._tracked.told(step)

    def note(self, step: int, text: str) -> None:
        """Nothing: sentences stand in `events.jsonl`."""

    def rewind(self, first_step: int) -> None:
        """Nothing: values cannot be taken back, and `log` adds no step twice."""

    def close(self) -> None:
        """Marks the run as ended."""
        self._client.set_terminated(self._tracked.id)


def _choose_switches() -> None:
    """MLflow reads these as it is imported or asks its server; what a user has set stays.

    Its file store is in maintenance mode and asks to be allowed. Its telemetry would reach for the
    network from a run that was told to write a folder. All ranks wait while rank 0 logs: with
    MLflow's own limits (120 s, 7 retries) a server that is silent would hold them for 20 minutes,
    and one that sends `Retry-After` for as long as it likes. With these it is about 35 s, once.
    """
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER", "false")


def _name(text: str) -> str:
    """With the characters alone that MLflow allows in a name."""
    return re.sub(r"[^\w\-. /]", "_", text)


def _slices(values: Sequence[T], size: int) -> Iterator[list[Any]]:
    rest = iter(values)
    while some := list(islice(rest, size)):
        yield some
