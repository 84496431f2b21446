"""What `megappo check` prints of a run on given answers."""

from __future__ import annotations

import sys

from megappo.config import SupervisedConfig
from megappo.config.findings import Findings
from megappo.trainer.supervised.preflight import scan_rows, supervised_preflight


def check_supervised_run(
    config: SupervisedConfig, world_size: int, mistakes: Findings, *, read_weights: bool
) -> None:
    """Prints what is right with it, after a look at every row.

    Args:
        config: of the run.
        world_size: ranks.
        mistakes: that are known already.
        read_weights: see `supervised_preflight`.

    Raises:
        UserError: everything that is wrong.
    """
    found = supervised_preflight(
        config, world_size, read_weights=read_weights, read_all_rows=True, found=mistakes
    )
    course = scan_rows(config, found)
    for line in found.plan.lines():
        sys.stdout.write(line + "\n")
    for change in found.changes:
        sys.stdout.write(f"changed    {change} (since {found.checkpoint})\n")
    for rows in (found.train_set, found.val_set):
        if rows is not None:
            sys.stdout.write(f"data       {rows.in_words}\n")
    sys.stdout.write(f"steps      {course.total_steps}\n")
