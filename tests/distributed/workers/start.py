"""How most workers begin: `--config CONFIG --out FOLDER [key=value ...]`, and the rank's place."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from megappo.config import Config, load
from megappo.distributed import parallel
from megappo.distributed.environment import LaunchEnvironment
from megappo.models.spec import ModelSpec, load_spec
from megappo.trainer.preflight import model_paths


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One rank of a test. `context` is to be given to `parallel.stop` at the end."""

    config: Config
    out: Path
    context: parallel.ParallelContext
    specs: dict[str, ModelSpec]
    """role -> its model"""


def start_worker() -> Worker:
    """Reads the command line and joins the other ranks. Collective over the world."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    config = load(arguments.config, arguments.overrides)
    degrees = parallel.Degrees.of(config.parallel)
    context = parallel.start(LaunchEnvironment.read(), degrees, device="cpu", seed=1, timeout_s=300)
    specs = {role: load_spec(path) for role, path in model_paths(config).items()}
    return Worker(config=config, out=arguments.out, context=context, specs=specs)
