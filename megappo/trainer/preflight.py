"""Everything about a run that can be wrong and be seen without a device, a model or an engine.

`megappo check` is this and nothing else; a training run does it first, on every rank.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.checkpoint import layout
from megappo.checkpoint.compare import (
    LAYOUT_FIELDS,
    check_base_weights,
    check_config,
    check_data,
    check_format,
    check_layout,
    check_models,
    config_changes,
    flatten,
    layout_changes,
    model_identity,
)
from megappo.config import Config, ConfigError
from megappo.config.algorithm_checks import algorithm_warnings
from megappo.config.checks import BatchPlan, plan_batches
from megappo.data.identity import file_identities
from megappo.data.prompts import PromptDataset, check_files
from megappo.data.sampler import PromptSampler
from megappo.errors import CheckpointError, ModelError, UserError
from megappo.models.build import check_layout as check_model_layout
from megappo.models.lora import check_targets
from megappo.models.packing import Alignment, token_multiple
from megappo.models.spec import ModelSpec, load_spec
from megappo.models.weights import check_weights
from megappo.rewards import resolve
from megappo.rollout.sampling import end_token_ids
from megappo.trainer.micro_batches import token_budget


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What the checks found out, for the build that follows."""

    plan: BatchPlan
    actor_spec: ModelSpec
    critic_spec: ModelSpec | None
    """None where no critic is needed"""
    reference_spec: ModelSpec
    tokenizer: Any
    train_set: PromptDataset
    train_sources: tuple[str, ...]
    val_set: PromptDataset | None
    val_sources: tuple[str, ...]
    sampler: PromptSampler
    total_steps: int
    end_in_words: str
    """what the end of the run is the end of"""
    checkpoint: Path | None
    changes: tuple[str, ...]
    """what is other than when the checkpoint was written, layout first"""
    train_files: tuple[Mapping[str, Any], ...]
    base_weights: Mapping[str, Sequence[Mapping[str, Any]]]
    """files below the adapters, of the roles that have some"""
    """of `file_identities`"""
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
) -> Preflight:
    """Checks batch arithmetic, model folders, data files, rewards and the run's folder.

    Args:
        config: of the run.
        world_size: ranks.
        local_world_size: ranks of a node; None where all are on one.
        read_all_rows: look at every row, so that a prompt that is too long or cannot be rendered,
            or an answer that is missing, is found now; one rank doing so is enough.

    Raises:
        UserError: the first thing that is wrong, with numbers and remedy.
    """
    plan, problems = plan_batches(config, world_size, local_world_size=local_world_size)
    if plan is None:
        raise ConfigError("\n".join(problems))
    _check_budgets(config)
    specs = _check_models(config)
    _check_engine_family(specs["actor"], config.rollout.engine)
    if config.rollout.engine == "sglang":
        _check_engine_split(specs["actor"], config.rollout.tp)
    end_token_ids(config.model.path)  # a model without any would never end a response
    check_files(config.data.train_files, prompt_key=config.data.prompt_key)
    if config.data.val_files:
        check_files(config.data.val_files, prompt_key=config.data.prompt_key, name="val")
    tokenizer = _load_tokenizer(config)
    train_set = _dataset(config, tokenizer, "train")
    val_set = _dataset(config, tokenizer, "val") if config.data.val_files else None
    train_sources = tuple(train_set.data_sources())
    val_sources = tuple(val_set.data_sources()) if val_set else ()
    resolve({*train_sources, *val_sources}, config.reward)
    sampler = PromptSampler(
        len(train_set),
        batch_size=config.data.train_batch_size,
        seed=config.trainer.seed,
        shuffle=config.data.shuffle,
        num_dropped=train_set.num_dropped,
    )
    for rows in (train_set, val_set):
        if rows is not None:
            len(rows)  # with truncation `drop` this renders all, and finds "all rows too long"
            if read_all_rows:
                rows.check_ground_truths()
                if config.data.truncation != "drop":
                    rows.check_prompts()
    total = config.trainer.total_steps or config.trainer.total_epochs * sampler.batches_per_epoch
    train_files = tuple(file_identities(config.data.train_files))
    base_weights = _base_weights(config)
    checkpoint = _check_run_dir(config)
    changes: tuple[str, ...] = ()
    if checkpoint is not None:
        state = layout.read_state(checkpoint)
        changes = _check_state(config, state, checkpoint, plan, specs)
        check_data(state, train_files, checkpoint)
        check_base_weights(state, base_weights, checkpoint)
        _check_sampler(state, sampler)
    return Preflight(
        plan=plan,
        actor_spec=specs["actor"],
        critic_spec=specs.get("critic"),
        reference_spec=specs["reference"],
        tokenizer=tokenizer,
        train_set=train_set,
        train_sources=train_sources,
        val_set=val_set,
        val_sources=val_sources,
        sampler=sampler,
        total_steps=total,
        end_in_words=_end_in_words(config, sampler, total),
        checkpoint=checkpoint,
        changes=changes,
        train_files=train_files,
        base_weights=base_weights,
        warnings=tuple(_warnings(config, specs)),
    )


def _end_in_words(config: Config, sampler: PromptSampler, total: int) -> str:
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


def _base_weights(config: Config) -> dict[str, list[dict[str, Any]]]:
    paths = model_paths(config)
    return {
        role: file_identities(sorted(Path(paths[role]).glob("*.safetensors")))
        for role, settings in (("actor", config.actor), ("critic", config.critic))
        if settings.lora.rank and role in paths
    }


def model_paths(config: Config) -> dict[str, str]:
    """Folder of each role; no critic where none is needed."""
    paths = {"actor": config.model.path}
    if config.uses_critic:
        paths["critic"] = config.critic.path or config.model.path
    return paths | {"reference": config.reference.path or config.model.path}


def _check_budgets(config: Config) -> None:
    """With its padding the longest sample must fit, or one rank alone would meet one that does not.

    Raises:
        ConfigError: with the numbers.
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
    longest = alignment.padded(config.data.max_prompt_length + config.rollout.max_response_length)
    for name, role in config.trained_roles.items():
        budget = token_budget(role, alignment)
        if role.use_dynamic_bsz and longest > budget:
            raise ConfigError(
                f"{name}.max_token_len_per_gpu is {role.max_token_len_per_gpu}: rows are padded to "
                f"multiples of {alignment.row_multiple} in this layout, which leaves {budget} "
                f"positions over CP {layout.cp} for the longest sample's {longest}; raise it by "
                f"{alignment.row_multiple}"
            )


def wanted_layers(config: Config, spec: ModelSpec) -> Sequence[int]:
    """`parallel.pipeline_layers`, or nothing for a model of another depth than they describe."""
    wanted = config.parallel.pipeline_layers
    return wanted if sum(wanted) == spec.num_layers else ()


def _check_models(config: Config) -> dict[str, ModelSpec]:
    specs: dict[str, ModelSpec] = {}
    for role, path in model_paths(config).items():
        spec = load_spec(path, trust_remote_code=config.model.trust_remote_code)
        _check_split(config, role, path, spec)
        check_weights(path, spec, head="value" if role == "critic" else "lm")
        if role != "reference":
            lora = config.actor.lora if role == "actor" else config.critic.lora
            check_targets(spec, lora, key=f"{role}.lora")
        specs[role] = spec
    spreads_experts = config.parallel.ep > 1 or config.parallel.etp > 1
    if spreads_experts and not any(spec.num_experts for spec in specs.values()):
        raise ConfigError(
            f"parallel.ep is {config.parallel.ep} and parallel.etp {config.parallel.etp}: none of "
            "the models has experts to spread; set them to 1 and 0"
        )
    _check_stop_tokens(config, specs["actor"])
    for key, length in (
        ("rollout.max_response_length", config.rollout.max_response_length),
        ("rollout.val.max_response_length", config.rollout.val_response_length),
    ):
        wanted = config.data.max_prompt_length + length
        for role, spec in specs.items():
            if wanted > spec.max_positions:
                raise ConfigError(
                    f"data.max_prompt_length {config.data.max_prompt_length} + {key} {length} = "
                    f"{wanted} is more than the {role}'s {spec.max_positions} positions: lower one "
                    "of them"
                )
    for role, spec in specs.items():
        if spec.vocab_size != specs["actor"].vocab_size:
            raise ModelError(
                f"the {role} has a vocabulary of {spec.vocab_size} and the actor one of "
                f"{specs['actor'].vocab_size}: all roles must read the same token ids"
            )
    return specs


def _check_split(config: Config, role: str, path: str, spec: ModelSpec) -> None:
    layout = config.parallel
    try:
        check_model_layout(
            spec,
            tp=layout.tp,
            pp=layout.pp,
            vp=layout.vpp,
            ep=layout.ep if spec.num_experts else 1,
            etp=layout.expert_tp if spec.num_experts else None,
            sequence_parallel=layout.sequence_parallel,
            pipeline_layers=(
                layout.pipeline_layers if role == "actor" else wanted_layers(config, spec)
            ),
        )
    except ModelError as error:
        raise ModelError(f"the {role} ({path}): {error}") from error


def _check_stop_tokens(config: Config, spec: ModelSpec) -> None:
    unknown = [token for token in config.rollout.stop_token_ids if token >= spec.vocab_size]
    if unknown:
        raise ConfigError(
            f"rollout.stop_token_ids has {unknown}: the actor's vocabulary has the ids 0 to "
            f"{spec.vocab_size - 1}, so no response would ever end with them; remove them"
        )


def _check_engine_family(spec: ModelSpec, engine: str) -> None:
    if engine == "sglang" and spec.latent is not None:
        raise ConfigError(
            f"rollout.engine is sglang and the actor a {spec.model_type} model: SGLang fuses two "
            "of its projections only if one push request has both, so weights that are pushed in "
            "buckets are not proved right; set rollout.engine=megatron"
        )


def _check_engine_split(spec: ModelSpec, tp: int) -> None:
    """SGLang must know the kinds of layers, and cut them into `rollout.tp` equal parts."""
    has_dense_layers = not (spec.num_experts and all(spec.moe_layers))
    if spec.model_type == "qwen3_moe" and has_dense_layers:
        dense = [number for number, has_experts in enumerate(spec.moe_layers) if not has_experts]
        raise ConfigError(
            f"rollout.engine is 'sglang': the actor's layers {dense} have no experts "
            "(mlp_only_layers, decoder_sparse_step), and SGLang gives every layer of a "
            f"{spec.model_type} model experts, without a word; use a model with experts in every "
            "layer, or rollout.engine=megatron"
        )
    split = {"attention heads": spec.num_heads}
    if has_dense_layers:
        split["MLP columns"] = spec.ffn_hidden_size
    if spec.num_experts:
        split["columns of an expert"] = spec.moe_ffn_hidden_size
    if spec.shared_ffn_hidden_size:
        split["columns of the shared experts"] = spec.shared_ffn_hidden_size
    for what, count in split.items():
        if count % tp:
            raise ConfigError(
                f"rollout.tp is {tp}: the actor has {count} {what}, which SGLang splits evenly; "
                f"choose a rollout.tp that divides {count}"
            )
    heads = spec.num_kv_heads
    if heads % tp and tp % heads:
        raise ConfigError(
            f"rollout.tp is {tp}: the actor has {heads} key-value heads, which SGLang splits or "
            f"repeats evenly; choose a rollout.tp that divides {heads} or is a multiple of it"
        )


def _load_tokenizer(config: Config) -> Any:
    with warnings.catch_warnings():
        # The CPU set-up has torchvision without its image library, which nothing here uses.
        warnings.filterwarnings("ignore", message="Failed to load image Python extension")
        from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            config.model.path,
            trust_remote_code=config.model.trust_remote_code,
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"the tokenizer in model.path {config.model.path} cannot be loaded: {first}"
        ) from error


def _dataset(config: Config, tokenizer: Any, name: str) -> PromptDataset:
    files = config.data.train_files if name == "train" else config.data.val_files
    return PromptDataset(
        files,
        tokenizer,
        max_prompt_length=config.data.max_prompt_length,
        truncation=config.data.truncation,
        prompt_key=config.data.prompt_key,
        name=name,
    )


def _check_run_dir(config: Config) -> Path | None:
    run_dir = Path(config.trainer.run_dir)
    nearest = next(p for p in (run_dir.absolute(), *run_dir.absolute().parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(f"trainer.run_dir {run_dir} cannot be written: {nearest} is not writable")
    found = layout.latest(layout.folder_of(run_dir))
    if found is None:
        return None
    if config.checkpoint.resume == "never":
        raise CheckpointError(
            f"checkpoint.resume is never and {found} exists: use another trainer.run_dir, remove "
            "the folder, or set checkpoint.resume=auto"
        )
    return found


def _check_state(
    config: Config,
    state: Mapping[str, Any],
    checkpoint: Path,
    plan: BatchPlan,
    specs: Mapping[str, ModelSpec],
) -> tuple[str, ...]:
    """What the run would go on with otherwise than the checkpoint, after refusing what it cannot.

    Raises:
        CheckpointError: with the difference.
    """
    degrees = {name: getattr(plan, name) for name in LAYOUT_FIELDS}
    check_layout(state, degrees, checkpoint)
    check_format(state, checkpoint, fsdp=config.parallel.fsdp)
    identities = {role: model_identity(specs[role]) for role in config.trained_roles}
    check_models(state, identities, checkpoint)
    now = flatten(config)
    check_config(state, now, checkpoint)
    moved = layout_changes(state, degrees)
    text = ", ".join(moved) + "; random streams start anew from trainer.seed and the step"
    return (*([text] if moved else []), *config_changes(state, now))


def _check_sampler(state: Mapping[str, Any], sampler: PromptSampler) -> None:
    replica = PromptSampler(
        sampler.num_rows,
        batch_size=sampler.batch_size,
        seed=sampler.seed,
        shuffle=sampler.shuffle,
    )
    replica.load_state_dict(state["sampler"])


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
