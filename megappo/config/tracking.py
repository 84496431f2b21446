"""The section of experiment trackers, and what the list `loggers` may name."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megappo.config.fields import Problems, opt

LOGGER_PACKAGES = {
    "console": "",
    "jsonl": "",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
}
"""Each logger, and the package that it imports; a test holds the names equal to the registry's."""

INSTALL = {"wandb": "wandb", "mlflow": "mlflow-skinny", "tensorboard": "tensorboard"}


@dataclass(frozen=True, kw_only=True)
class TrackingSection:
    """Names under which the loggers `wandb` and `mlflow` keep the run."""

    project_name: str = opt(
        "megappo", "wandb's project, mlflow's experiment", verl="trainer.project_name"
    )
    experiment_name: str = opt(
        "", "name of the run there; empty: that of the run's folder", verl="trainer.experiment_name"
    )
    wandb_mode: Literal["auto", "online", "offline"] = opt(
        "auto", "offline writes to the run's folder alone; auto: as WANDB_MODE says, else online"
    )
    mlflow_uri: str = opt(
        "", "MLflow's tracking URI; empty: a file store, mlruns/ in the run's folder"
    )

    def __post_init__(self) -> None:
        p = Problems()
        p.require(bool(self.project_name), "project_name", self.project_name, "name a project")
        p.done()


def check_loggers(loggers: Sequence[str]) -> list[str]:
    """Loggers that are unknown, named twice, or without their package."""
    problems = []
    for name in dict.fromkeys(loggers):
        if name not in LOGGER_PACKAGES:
            problems.append(f"loggers has {name!r}: known: {', '.join(LOGGER_PACKAGES)}")
            continue
        if loggers.count(name) > 1:
            problems.append(f"loggers has {name!r} {loggers.count(name)} times: name it once")
        package = LOGGER_PACKAGES[name]
        if package and importlib.util.find_spec(package) is None:
            problems.append(
                f"loggers has {name!r}: the package {package} is not installed; pip install "
                f"{INSTALL[name]} (or megappo's extra `tracking`), or take {name!r} out"
            )
    return problems
