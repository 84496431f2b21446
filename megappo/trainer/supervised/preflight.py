"""What can be wrong with a run on given answers and be seen without a device or a model.

Rows are not looked at here, but for their columns: that takes a while, and the ranks of a run share
it (`scan_rows`). `megappo check` looks at all of them by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megappo.checkpoint import layout
from megappo.checkpoint.compare import (
    LAYOUT_FIELDS,
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
from megappo.config import ConfigError, SupervisedConfig
from megappo.config.findings import Findings
from megappo.config.supervised_checks import SupervisedPlan, plan_supervised
from megappo.data.examples import Columns, ExampleDataset, Scan, open_files
from megappo.data.identity import file_identities
from megappo.data.sampler import PromptSampler
from megappo.errors import DataError, SharedDataError
from megappo.models.packing import Alignment, token_multiple
from megappo.models.spec import (
    ModelSpec,
    check_tokenizer_files,
    check_weight_files,
    has_tokenizer,
    load_spec,
)
from megappo.models.weights import check_weights
from megappo.roles.objectives import AnswerLikelihood, Objective, PairPreference
from megappo.trainer.micro_batches import token_budget
from megappo.trainer.model_checks import check_split
from megappo.trainer.preflight import check_run_dir
from megappo.trainer.row_checks import check_token_ids, load_tokenizer

Gather = Callable[[Scan], list[Scan]]
"""This rank's scan -> those of all ranks."""


@dataclass(frozen=True, kw_only=True)
class SupervisedPreflight:
    """What the checks found out, for the build that follows."""

    plan: SupervisedPlan
    spec: ModelSpec
    objective: Objective
    train_set: ExampleDataset
    val_set: ExampleDataset | None
    checkpoint: Path | None
    state: Mapping[str, Any] | None
    """the checkpoint's"""
    changes: tuple[str, ...]
    """what is other than when the checkpoint was written, device and layout first"""
    train_files: tuple[Mapping[str, Any], ...]

    @property
    def resumed_step(self) -> int:
        """Finished steps of the checkpoint that the run goes on from; 0 for a new run."""
        return 0 if self.state is None else int(self.state["step"])


@dataclass(frozen=True, kw_only=True)
class Course:
    """What follows from the rows that can be used."""

    sampler: PromptSampler
    total_steps: int


def make_objective(config: SupervisedConfig) -> Objective:
    """What `task` names."""
    if config.task == "rm":
        return PairPreference(center_coef=config.training.center_coef)
    return AnswerLikelihood()


def supervised_preflight(
    config: SupervisedConfig,
    world_size: int,
    *,
    read_weights: bool = True,
    read_all_rows: bool = False,
    found: Findings | None = None,
) -> SupervisedPreflight:
    """Checks batch arithmetic, model folder, data files and the run's folder.

    Args:
        config: of the run.
        world_size: ranks.
        read_weights: compare names and shapes of the weights with config.json; without, the folder
            need not have any.
        read_all_rows: look at every row now; else `scan_rows` does.
        found: mistakes that are known already, of `config.load.read_any`.

    Raises:
        UserError: everything that is wrong, each with numbers and remedy.
    """
    found = found or Findings()
    plan, problems = plan_supervised(config, world_size)
    found.add(*problems)
    objective = make_objective(config)
    found.attempt(partial(_check_budget, config, objective.answers))
    spec = _check_model(config, objective, found, read_weights=read_weights)
    tokenizer = None
    if has_tokenizer(config.model.path):
        tokenizer = found.attempt(partial(load_tokenizer, config.model))
    if spec is not None and tokenizer is not None:
        path = config.model.path
        found.attempt(partial(check_token_ids, tokenizer, spec.vocab_size, path))
    sets = _check_files(config, tokenizer, found, read_all_rows=read_all_rows)
    checkpoint = found.attempt(
        partial(check_run_dir, config.trainer.run_dir, resume=config.checkpoint.resume),
        needs=("trainer.run_dir",),
    )
    found.raise_any()
    assert plan is not None
    assert spec is not None
    train_files = tuple(file_identities(config.data.train_files))
    state = None if checkpoint is None else layout.read_state(checkpoint)
    changes: tuple[str, ...] = ()
    if checkpoint is not None and state is not None:
        check = partial(_check_state, config, state, checkpoint, plan, spec)
        changes = found.attempt(check) or ()
        found.attempt(partial(check_data, state, train_files, checkpoint))
        found.raise_any()
    return SupervisedPreflight(
        plan=plan,
        spec=spec,
        objective=objective,
        train_set=sets["train"],
        val_set=sets.get("val"),
        checkpoint=checkpoint,
        state=state,
        changes=changes,
        train_files=train_files,
    )


def scan_rows(
    config: SupervisedConfig,
    found: SupervisedPreflight,
    *,
    rank: int = 0,
    world_size: int = 1,
    gather: Gather = lambda scan: [scan],
) -> Course:
    """Looks at every row, and at the data position of the checkpoint. Collective over `gather`'s.

    Args:
        config: of the run.
        found: of `supervised_preflight`.
        rank: this one looks at the `rank`-th of `world_size` parts of the rows.
        world_size: ranks that look.
        gather: exchanges what they find.

    Raises:
        SharedDataError: a row cannot be used, or too few are left.
        CheckpointError: the checkpoint's rows are others.
    """
    try:
        for rows in (found.train_set, found.val_set):
            if rows is not None and not rows.is_scanned:
                rows.use(gather(rows.scan(rank=rank, world_size=world_size)))
        left_out = found.train_set.found
        sampler = PromptSampler(
            len(found.train_set),
            batch_size=config.data.train_batch_size,
            seed=config.trainer.seed,
            shuffle=config.data.shuffle,
            num_dropped=left_out.num_too_long + left_out.num_equal,
        )
    except DataError as error:
        raise SharedDataError(str(error)) from error
    if found.state is not None:
        sampler.load_state_dict(found.state["sampler"])
    trainer = config.trainer
    total = trainer.total_steps or trainer.total_epochs * sampler.batches_per_epoch
    return Course(sampler=sampler, total_steps=total)


def _check_files(
    config: SupervisedConfig, tokenizer: Any, found: Findings, *, read_all_rows: bool
) -> dict[str, ExampleDataset]:
    """Train and validation rows that nothing is wrong with; without a tokenizer none."""
    data = config.data
    names = ("data.prompt_key", "data.chosen_key", "data.rejected_key", "data.margin_key")
    sets = {}
    for name, files in (("train", data.train_files), ("val", data.val_files)):
        if not files:  # refused by the config's own rules where they are needed
            continue
        if tokenizer is None:
            found.attempt(partial(open_files, files, _columns(config), name), needs=names)
            continue
        rows = found.attempt(partial(_dataset, config, tokenizer, name), needs=names)
        if rows is None:
            continue
        sets[name] = rows
        if read_all_rows:
            found.attempt(partial(_scan, rows), needs=("data.max_length", "data.too_long"))
    return sets


def _scan(rows: ExampleDataset) -> None:
    rows.use([rows.scan(rank=0, world_size=1)])


def _check_model(
    config: SupervisedConfig, objective: Objective, found: Findings, *, read_weights: bool
) -> ModelSpec | None:
    """The architecture, if config.json can be read."""
    path, degrees = config.model.path, config.parallel
    if not path or "model.path" in found.stand_ins:  # said by the config's own rules
        return None
    trust = config.model.trust_remote_code
    spec = found.attempt(partial(load_spec, path, trust_remote_code=trust, files=False))
    if spec is None:
        return None
    layers = degrees.pipeline_layers
    found.attempt(partial(check_split, degrees, "model", path, spec, pipeline_layers=layers))
    found.attempt(partial(check_tokenizer_files, Path(path)))
    if read_weights:
        found.attempt(partial(_check_weights, Path(path), spec, objective))
    if (degrees.ep > 1 or degrees.etp > 1) and not spec.num_experts:
        found.add(
            f"parallel.ep is {degrees.ep} and parallel.etp {degrees.etp}: the model has no experts "
            "to spread; set them to 1 and 0"
        )
    if config.data.max_length > spec.max_positions:
        found.add(
            f"data.max_length is {config.data.max_length}: the model has {spec.max_positions} "
            "positions; lower it"
        )
    return spec


def _check_weights(path: Path, spec: ModelSpec, objective: Objective) -> None:
    check_weight_files(path)
    check_weights(path, spec, head=objective.head)


def _check_budget(config: SupervisedConfig, answers: int) -> None:
    """With its padding the longest row must fit into a forward pass.

    What does not fit without padding is told by `config.supervised_checks`.
    """
    degrees, training = config.parallel, config.training
    if not training.use_dynamic_bsz:
        return
    alignment = Alignment(
        multiple_of=token_multiple(
            tp=degrees.tp,
            sequence_parallel=degrees.sequence_parallel,
            fp8_recipe=config.model.fp8_recipe if config.model.fp8 != "none" else None,
        ),
        cp=degrees.cp,
    )
    longest = answers * alignment.padded(config.data.max_length)
    budget = token_budget(training, alignment)
    fits_without = answers * config.data.max_length <= training.max_token_len_per_gpu * degrees.cp
    if fits_without and longest > budget:
        raise ConfigError(
            f"training.max_token_len_per_gpu is {training.max_token_len_per_gpu}: rows are padded "
            f"to multiples of {alignment.row_multiple} in this layout, which leaves {budget} "
            f"positions over CP {degrees.cp} for {answers} x data.max_length, {longest}; raise it "
            f"by {alignment.row_multiple}"
        )


def _columns(config: SupervisedConfig) -> Columns:
    data = config.data
    is_pairs = config.task == "rm"
    return Columns(
        prompt=data.prompt_key,
        answers=(data.chosen_key, data.rejected_key) if is_pairs else (data.chosen_key,),
        margin=data.margin_key,
    )


def _dataset(config: SupervisedConfig, tokenizer: Any, name: str) -> ExampleDataset:
    data = config.data
    return ExampleDataset(
        data.train_files if name == "train" else data.val_files,
        tokenizer,
        columns=_columns(config),
        max_length=data.max_length,
        too_long=data.too_long,
        name=name,
    )


def _check_state(
    config: SupervisedConfig,
    state: Mapping[str, Any],
    checkpoint: Path,
    plan: SupervisedPlan,
    spec: ModelSpec,
) -> tuple[str, ...]:
    """What the run would go on with otherwise, after refusing what it cannot.

    Raises:
        CheckpointError: with the difference.
    """
    check_task(state, config.task, checkpoint)
    degrees = {name: getattr(plan, name) for name in LAYOUT_FIELDS}
    check_layout(state, degrees, checkpoint)
    check_format(state, checkpoint, fsdp=config.parallel.fsdp)
    check_models(state, {config.task: model_identity(spec)}, checkpoint)
    now = flatten(config)
    check_config(state, now, checkpoint)
    moved = ", ".join(layout_changes(state, degrees))
    text = f"{moved}; random streams start anew from trainer.seed and the step"
    return (*([text] if moved else []), *config_changes(state, now))
