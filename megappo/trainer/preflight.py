"""Everything about a run that can be wrong and be seen without a device, a model or an engine.

`megappo check` is this and nothing else; a training run does it first, on every rank. A mistake in
one place does not end the search: whatever does not depend on it is looked at too, and all mistakes
are reported together.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megappo.checkpoint import layout
from megappo.checkpoint.compare import (
    device_changes,
)
from megappo.config import Config
from megappo.config.algorithm_checks import algorithm_warnings
from megappo.config.batch_plan import BatchPlan, plan_batches
from megappo.config.checks import check_device_features
from megappo.config.findings import Findings
from megappo.data.prompts import PromptDataset
from megappo.data.sampler import Sampler
from megappo.distributed import parallel
from megappo.distributed.environment import LaunchEnvironment
from megappo.errors import CheckpointError, UserError
from megappo.models.packing import Alignment, token_multiple
from megappo.models.spec import (
    ModelSpec,
)
from megappo.rollout.file_limit import file_limit_warning, raise_file_limit
from megappo.trainer.checkpoint_checks import (
    Known,
    base_weight_files,
    changes_since,
    check_checkpoint,
    readable_train_files,
)
from megappo.trainer.micro_batches import PassSize, token_budget
from megappo.trainer.model_checks import (
    check_engine,
    check_model_folders,
    model_paths,
    wanted_layers,
)
from megappo.trainer.risks import risks
from megappo.trainer.row_checks import check_rows, check_token_ids

__all__ = ["Preflight", "check_here", "model_paths", "preflight", "wanted_layers"]


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What the checks found out, for the build that follows."""

    plan: BatchPlan
    actor_spec: ModelSpec
    critic_spec: ModelSpec | None
    """None where no critic is needed"""
    reference_spec: ModelSpec
    reward_spec: ModelSpec | None
    """of the reward model"""
    tokenizer: Any
    train_set: PromptDataset
    train_sources: tuple[str, ...]
    val_set: PromptDataset | None
    val_sources: tuple[str, ...]
    sampler: Sampler
    total_steps: int
    end_in_words: str
    """what the end of the run is the end of"""
    checkpoint: Path | None
    changes: tuple[str, ...]
    """what is other than when the checkpoint was written, device and layout first"""
    train_files: tuple[Mapping[str, Any], ...]
    """of `file_identities`"""
    base_weights: Mapping[str, Sequence[Mapping[str, Any]]]
    """files below the adapters, of the roles that have some"""
    warnings: tuple[str, ...]

    @property
    def resumed_step(self) -> int:
        """Finished steps of the checkpoint that the run goes on from; 0 for a new run."""
        return 0 if self.checkpoint is None else int(layout.read_state(self.checkpoint)["step"])


def preflight(
    config: Config,
    world_size: int,
    *,
    local_world_size: int | None = None,
    read_all_rows: bool = True,
    read_weights: bool = True,
    found: Findings | None = None,
) -> Preflight:
    """Checks batch arithmetic, model folders, data files, rewards and the run's folder.

    Args:
        config: of the run.
        world_size: ranks.
        local_world_size: ranks of a node; None where all are on one.
        read_all_rows: look at every row, so that a prompt that is too long or cannot be rendered,
            or an answer that is missing, is found now; one rank doing so is enough.
        read_weights: compare names and shapes of the weights with config.json; without, the folders
            need not have any.
        found: mistakes that are known already, of `config.load.read`.

    Raises:
        UserError: everything that is wrong, each with numbers and remedy.
    """
    found = found or Findings()
    plan, problems = plan_batches(config, world_size, local_world_size=local_world_size)
    found.add(*problems, *_check_budgets(config))
    specs = check_model_folders(config, found, read_weights=read_weights)
    if "actor" in specs:
        check_engine(config, specs["actor"], found)
    data = check_rows(config, found, read_all_rows=read_all_rows)
    if "actor" in specs and data.tokenizer is not None:
        vocab_size = specs["actor"].vocab_size
        found.attempt(partial(check_token_ids, data.tokenizer, vocab_size, config.model.path))
    checkpoint = found.attempt(
        partial(check_run_dir, config.trainer.run_dir, resume=config.checkpoint.resume),
        needs=("trainer.run_dir",),
    )
    train_files = readable_train_files(config, data)
    base_weights = base_weight_files(config, specs)
    state = None if checkpoint is None else found.attempt(partial(layout.read_state, checkpoint))
    if checkpoint is not None and state is not None:
        known = Known(
            config=config,
            plan=plan,
            specs=specs,
            rows=data,
            train_files=train_files,
            base_weights=base_weights,
        )
        check_checkpoint(state, checkpoint, known, found)
    found.raise_any()
    assert plan is not None
    sampler, train_set = data.sampler, data.sets["train"]
    assert sampler is not None
    total = config.trainer.total_steps or config.trainer.total_epochs * sampler.batches_per_epoch
    return Preflight(
        plan=plan,
        actor_spec=specs["actor"],
        critic_spec=specs.get("critic"),
        reference_spec=specs["reference"],
        reward_spec=specs.get("reward_model"),
        tokenizer=data.tokenizer,
        train_set=train_set,
        train_sources=tuple(data.sources["train"]),
        val_set=data.sets.get("val"),
        val_sources=tuple(data.sources["val"]),
        sampler=sampler,
        total_steps=total,
        end_in_words=_end_in_words(config, sampler, total),
        checkpoint=checkpoint,
        changes=() if state is None else changes_since(state, config, plan),
        train_files=train_files,
        base_weights=base_weights,
        warnings=(
            *_warnings(config, specs),
            *data.warnings,
            *risks(
                config,
                specs,
                plan,
                total_steps=total,
                local_world_size=local_world_size or world_size,
            ),
        ),
    )


def check_here(
    config: Config, launch: LaunchEnvironment, mistakes: Findings
) -> tuple[str, Preflight]:
    """Device of a run that starts on this machine, and what `preflight` finds. No other rank.

    Raises the limit of open files, which engines will need.

    Args:
        config: of the run.
        launch: this rank's place.
        mistakes: of reading the config.

    Raises:
        UserError: everything that is wrong.
    """
    device = mistakes.attempt(partial(parallel.resolve_device, config.device), needs=("device",))
    if device is not None:
        mistakes.add(*check_device_features(config, device))
        mistakes.attempt(partial(parallel.check_device, device, launch))
    found = preflight(
        config,
        launch.world_size,
        local_world_size=launch.local_world_size,
        read_all_rows=launch.rank == 0,
        found=mistakes,
    )
    assert device is not None
    few_files = file_limit_warning(raise_file_limit())
    changes = found.changes
    if found.checkpoint is not None:
        changes = (*device_changes(layout.read_state(found.checkpoint), device), *changes)
    warnings = (*found.warnings, *filter(None, [few_files]))
    return device, replace(found, changes=changes, warnings=warnings)


def _end_in_words(config: Config, sampler: Sampler, total: int) -> str:
    batches = sampler.batches_per_epoch
    if not config.trainer.total_steps:
        return (
            f"{total} steps: trainer.total_epochs is {config.trainer.total_epochs}, and an epoch "
            f"has {batches}"
        )
    epoch, batch = (total - 1) // batches, (total - 1) % batches + 1
    return (
        f"{total} steps, as trainer.total_steps says: up to batch {batch} of {batches} in epoch "
        f"{epoch + 1}"
    )


def _check_budgets(config: Config) -> list[str]:
    """With its padding the longest sample must fit, or one rank alone would meet one that does not.

    What does not fit without padding is told by `config.checks`.
    """
    layout = config.parallel
    alignment = Alignment(
        multiple_of=token_multiple(
            tp=layout.tp,
            sequence_parallel=layout.sequence_parallel,
            fp8_recipe=config.model.fp8_recipe if config.model.fp8 != "none" else None,
        ),
        cp=layout.cp,
    )
    tokens = config.data.max_prompt_length + config.rollout.max_response_length
    longest = alignment.padded(tokens)
    problems = []
    roles: dict[str, PassSize] = dict(config.trained_roles)
    if config.reward_model.path:
        roles["reward_model"] = config.reward_model
    for name, role in roles.items():
        budget = token_budget(role, alignment)
        fits_without = tokens <= role.max_token_len_per_gpu * layout.cp
        if role.use_dynamic_bsz and fits_without and longest > budget:
            problems.append(
                f"{name}.max_token_len_per_gpu is {role.max_token_len_per_gpu}: rows are padded to "
                f"multiples of {alignment.row_multiple} in this layout, which leaves {budget} "
                f"positions over CP {layout.cp} for the longest sample's {longest}; raise it by "
                f"{alignment.row_multiple}"
            )
    return problems


def check_run_dir(folder: str, *, resume: str) -> Path | None:
    """The checkpoint that a run in this folder goes on from, if there is any.

    Raises:
        UserError: the folder cannot be written.
        CheckpointError: there is one and `resume` is `never`, or it is not whole.
    """
    run_dir = Path(folder)
    nearest = next(p for p in (run_dir.absolute(), *run_dir.absolute().parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(f"trainer.run_dir {run_dir} cannot be written: {nearest} is not writable")
    found = layout.latest(layout.folder_of(run_dir))
    if found is None:
        return None
    if resume == "never":
        raise CheckpointError(
            f"checkpoint.resume is never and {found} exists: use another trainer.run_dir, remove "
            "the folder, or set checkpoint.resume=auto"
        )
    return found


def _warnings(config: Config, specs: Mapping[str, ModelSpec]) -> list[str]:
    found = [
        f"the {role}'s config.json counts {spec.dropped_layers} layer(s) that predict several "
        "tokens (num_nextn_predict_layers): they are dropped, neither trained nor pushed nor "
        "written, and written folders count 0"
        for role, spec in specs.items()
        if spec.dropped_layers
    ]
    if config.rollout.truncates:
        found.append(
            "rollout.top_p, top_k or min_p leave out tokens: an engine may report log-probs of the "
            "kept ones alone, so guard.max_log_prob_diff and guard.warn_log_prob_diff do not "
            "check; old log-probs are the trainer's, over the whole vocabulary"
        )
    return found + algorithm_warnings(config)
