"""What `megappo check` prints of a run on given answers."""

from __future__ import annotations

import math
import sys

from megappo.config import Config, ConfigError, SupervisedConfig
from megappo.config.checks import check_cpu_features
from megappo.trainer.supervised.preflight import scan_rows, supervised_preflight


def check_supervised_run(
    config: Config | SupervisedConfig, world_size: int | None, *, read_weights: bool
) -> None:
    """Prints what is right with it, after a look at every row.

    Args:
        config: with another task than `ppo`.
        world_size: ranks; None for as few as the layout allows.
        read_weights: see `supervised_preflight`.

    Raises:
        UserError: the first thing that is wrong.
    """
    assert isinstance(config, SupervisedConfig)
    if config.device == "cpu" and (problems := check_cpu_features(config.model, config.parallel)):
        raise ConfigError("\n".join(problems))
    layout = config.parallel
    fewest = math.lcm(layout.tp * layout.cp, layout.expert_tp * layout.ep) * layout.pp
    ranks = fewest if world_size is None else world_size
    found = supervised_preflight(config, ranks, read_weights=read_weights)
    course = scan_rows(config, found)
    for line in found.plan.lines():
        sys.stdout.write(line + "\n")
    for change in found.changes:
        sys.stdout.write(f"changed    {change} (since {found.checkpoint})\n")
    for rows in (found.train_set, found.val_set):
        if rows is not None:
            sys.stdout.write(f"data       {rows.in_words}\n")
    sys.stdout.write(f"steps      {course.total_steps}\n")
