"""Whether a run can go on from its checkpoint, told together with all that is wrong with the run.

What another check found no value for (a mistaken key, a file that cannot be read, a layout that
does not divide the ranks) is not compared: nothing is said about stand-ins.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megappo.checkpoint.compare import (
    LAYOUT_FIELDS,
    check_base_weights,
    check_config,
    check_data,
    check_format,
    check_layout,
    check_models,
    check_task,
    config_changes,
    flatten,
    layout_changes,
    model_identity,
)
from megappo.config import Config
from megappo.config.batch_plan import BatchPlan
from megappo.config.findings import Findings
from megappo.data.identity import file_identities
from megappo.data.sampler import Sampler
from megappo.models.spec import ModelSpec
from megappo.trainer.model_checks import model_paths
from megappo.trainer.row_checks import Rows

Files = Sequence[Mapping[str, Any]]
"""of `file_identities`"""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of a run that is to go on."""

    config: Config
    plan: BatchPlan | None
    """None where the ranks or the batch cannot be shared out"""
    specs: Mapping[str, ModelSpec]
    """of the roles whose config.json can be read"""
    rows: Rows
    train_files: Files
    """none where they cannot be read"""
    base_weights: Mapping[str, Files]
    """below the adapters, of the roles whose folder has weights"""


def readable_train_files(config: Config, rows: Rows) -> tuple[dict[str, Any], ...]:
    """What the training files are; nothing where they cannot be read."""
    if rows.num_train_rows is None:
        return ()
    return tuple(file_identities(config.data.train_files))


def base_weight_files(
    config: Config, specs: Mapping[str, ModelSpec]
) -> dict[str, list[dict[str, Any]]]:
    """The files below the adapters of each role that has some, and a folder with weights."""
    paths = model_paths(config)
    found = {
        role: file_identities(sorted(Path(paths[role]).glob("*.safetensors")))
        for role, settings in config.trained_roles.items()
        if settings.lora.rank and role in specs
    }
    return {role: files for role, files in found.items() if files}


def check_checkpoint(
    state: Mapping[str, Any], checkpoint: Path, known: Known, found: Findings
) -> None:
    """Notes everything in which the run does not fit its checkpoint.

    Args:
        state: the checkpoint's small state.
        checkpoint: its folder, for the messages.
        known: of the run.
        found: mistakes so far; those of the checkpoint are added.
    """
    num_problems = len(found.problems)
    found.attempt(partial(check_task, state, "ppo", checkpoint))
    if len(found.problems) > num_problems:  # nothing else of it can be compared
        return
    config = known.config
    layout_is_known = not any(key.startswith("parallel.") for key in found.stand_ins)
    if known.plan is not None and layout_is_known:
        found.attempt(partial(check_layout, state, _degrees(known.plan), checkpoint))
    check = partial(check_format, state, checkpoint, fsdp=config.parallel.fsdp)
    found.attempt(check, needs=("parallel.fsdp",))
    for role in config.trained_roles:
        if role in known.specs:
            identity = {role: model_identity(known.specs[role])}
            check = partial(check_models, state, identity, checkpoint)
            found.attempt(check, needs=("algorithm.adv_estimator", f"{role}.path"))
    given = {k: v for k, v in flatten(config).items() if k not in found.stand_ins}
    found.attempt(partial(check_config, state, given, checkpoint))
    if known.train_files:
        found.attempt(partial(check_data, state, known.train_files, checkpoint))
    for role, files in known.base_weights.items():
        found.attempt(partial(check_base_weights, state, {role: files}, checkpoint))
    # Without a tokenizer the order is a plain one, whatever the run's is.
    if known.rows.sampler is not None and known.rows.tokenizer is not None:
        check = partial(_check_sampler, state, known.rows.sampler)
        found.attempt(check, needs=("trainer.seed", "data.shuffle"))


def changes_since(state: Mapping[str, Any], config: Config, plan: BatchPlan) -> tuple[str, ...]:
    """What a run goes on with otherwise than its checkpoint was written, layout first."""
    moved = ", ".join(layout_changes(state, _degrees(plan)))
    text = f"{moved}; random streams start anew from trainer.seed and the step"
    return (*([text] if moved else []), *config_changes(state, flatten(config)))


def _degrees(plan: BatchPlan) -> dict[str, int]:
    return {name: getattr(plan, name) for name in LAYOUT_FIELDS}


def _check_sampler(state: Mapping[str, Any], sampler: Sampler) -> None:
    copy.deepcopy(sampler).load_state_dict(state["sampler"])
