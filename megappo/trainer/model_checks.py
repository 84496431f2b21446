"""What can be wrong with model folders, and between them, the layout and the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from megappo.config import Config, ConfigError
from megappo.config.findings import Findings
from megappo.config.layout import ParallelSection
from megappo.errors import ModelError
from megappo.models.build import check_layout as check_model_layout
from megappo.models.lora import check_targets
from megappo.models.name_map import Head
from megappo.models.spec import ModelSpec, check_tokenizer_files, check_weight_files, load_spec
from megappo.models.weights import check_weights
from megappo.rollout.sampling import end_token_ids
from megappo.trainer.reward_model_checks import check_head


def model_paths(config: Config) -> dict[str, str]:
    """Folder of each role; no critic where none is needed."""
    paths = {"actor": config.model.path}
    if config.uses_critic:
        paths["critic"] = config.critic.path or config.model.path
    paths["reference"] = config.reference.path or config.model.path
    return paths | ({"reward_model": config.reward_model.path} if config.reward_model.path else {})


def wanted_layers(layout: ParallelSection, spec: ModelSpec) -> Sequence[int]:
    """`parallel.pipeline_layers`, or nothing for a model of another depth than they describe."""
    wanted = layout.pipeline_layers
    return wanted if sum(wanted) == spec.num_layers else ()


def check_model_folders(
    config: Config, found: Findings, *, read_weights: bool
) -> dict[str, ModelSpec]:
    """The architecture of each role whose config.json can be read; one folder is told of once."""
    specs: dict[str, ModelSpec] = {}
    by_path: dict[str, ModelSpec | None] = {}
    for role, path in model_paths(config).items():
        if not path or "model.path" in found.stand_ins:  # said by the config's own rules
            continue
        is_new = path not in by_path
        if is_new:
            trust = config.model.trust_remote_code
            by_path[path] = found.attempt(
                partial(load_spec, path, trust_remote_code=trust, files=False)
            )
        spec = by_path[path]
        if spec is None:
            continue
        specs[role] = spec
        if is_new:
            layers = wanted_layers(config.parallel, spec)
            if role == "actor":
                layers = config.parallel.pipeline_layers
            found.attempt(
                partial(check_split, config.parallel, role, path, spec, pipeline_layers=layers)
            )
            found.attempt(partial(check_tokenizer_files, Path(path)))
        if role in config.trained_roles:
            lora = config.trained_roles[role].lora
            found.attempt(partial(check_targets, spec, lora, key=f"{role}.lora"))
        if read_weights:
            _check_weights(path, spec, role, found)
    for check in (_check_experts, _check_stop_tokens, _check_positions, _check_vocabularies):
        found.add(*check(config, specs))
    return specs


def check_split(
    layout: ParallelSection,
    role: str,
    path: str,
    spec: ModelSpec,
    *,
    pipeline_layers: Sequence[int],
) -> None:
    """Whether a model can be split as the layout says.

    Raises:
        ModelError: naming role and folder.
    """
    try:
        check_model_layout(
            spec,
            tp=layout.tp,
            pp=layout.pp,
            vp=layout.vpp,
            ep=layout.ep if spec.num_experts else 1,
            etp=layout.expert_tp if spec.num_experts else None,
            sequence_parallel=layout.sequence_parallel,
            pipeline_layers=pipeline_layers,
        )
    except ModelError as error:
        raise ModelError(f"the {role} ({path}): {error}") from error


def _check_weights(path: str, spec: ModelSpec, role: str, found: Findings) -> None:
    num_problems = len(found.problems)
    found.attempt(partial(check_weight_files, Path(path)))
    if len(found.problems) == num_problems:
        if role == "reward_model":
            found.attempt(partial(check_head, Path(path)))
        if len(found.problems) > num_problems:
            return
        head: Head = "value" if role in ("critic", "reward_model") else "lm"
        found.attempt(partial(check_weights, path, spec, head=head))


def _check_experts(config: Config, specs: Mapping[str, ModelSpec]) -> list[str]:
    layout = config.parallel
    if layout.ep == 1 and layout.etp <= 1:
        return []
    if not specs or any(spec.num_experts for spec in specs.values()):
        return []
    return [
        f"parallel.ep is {layout.ep} and parallel.etp {layout.etp}: none of the models has experts "
        "to spread; set them to 1 and 0"
    ]


def _check_positions(config: Config, specs: Mapping[str, ModelSpec]) -> list[str]:
    problems = []
    for key, length in (
        ("rollout.max_response_length", config.rollout.max_response_length),
        ("rollout.val.max_response_length", config.rollout.val_response_length),
    ):
        wanted = config.data.max_prompt_length + length
        short = {role: s for role, s in specs.items() if wanted > s.max_positions}
        if short:
            role, spec = min(short.items(), key=lambda item: item[1].max_positions)
            problems.append(
                f"data.max_prompt_length {config.data.max_prompt_length} + {key} {length} = "
                f"{wanted} is more than the {role}'s {spec.max_positions} positions: lower one of "
                "them"
            )
            if key == "rollout.max_response_length" and not config.rollout.val.max_response_length:
                break  # validation has the same length
    return problems


def _check_vocabularies(config: Config, specs: Mapping[str, ModelSpec]) -> list[str]:
    actor = specs.get("actor")
    return [
        f"the {role} has a vocabulary of {spec.vocab_size} and the actor one of "
        f"{actor.vocab_size}: all roles must read the same token ids"
        for role, spec in specs.items()
        if actor is not None and spec.vocab_size != actor.vocab_size
    ]


def _check_stop_tokens(config: Config, specs: Mapping[str, ModelSpec]) -> list[str]:
    if "actor" not in specs:
        return []
    vocab_size = specs["actor"].vocab_size
    unknown = [token for token in config.rollout.stop_token_ids if token >= vocab_size]
    if not unknown:
        return []
    return [
        f"rollout.stop_token_ids has {unknown}: the actor's vocabulary has the ids 0 to "
        f"{vocab_size - 1}, so no response would ever end with them; remove them"
    ]


def check_engine(config: Config, spec: ModelSpec, found: Findings) -> None:
    """Whether what generates can take the actor, and knows where its responses end."""
    found.attempt(partial(check_engine_family, spec, config.rollout.engine))
    if config.rollout.engine == "sglang":
        found.attempt(partial(check_engine_split, spec, config.rollout.tp), needs=("rollout.tp",))
    # A model without any would never end a response.
    found.attempt(partial(end_token_ids, config.model.path))


def check_engine_family(spec: ModelSpec, engine: str) -> None:
    """SGLang must be able to take the weights in buckets."""
    if engine == "sglang" and spec.latent is not None:
        raise ConfigError(
            f"rollout.engine is sglang and the actor a {spec.model_type} model: SGLang fuses two "
            "of its projections only if one push request has both, so weights that are pushed in "
            "buckets are not proved right; set rollout.engine=megatron"
        )


def check_engine_split(spec: ModelSpec, tp: int) -> None:
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
