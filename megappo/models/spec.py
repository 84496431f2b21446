"""A model as read from the `config.json` of a Hugging Face folder: only numbers, no weights.

Reading takes milliseconds and imports no framework, so `megappo check` and the planner use it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.errors import ModelError
from megappo.models.families import FAMILIES, Family
from megappo.models.families.refused import REFUSED
from megappo.models.parts import PLAIN_SOFTMAX, USUAL_NAMES, ExpertNames, Latent, RouterRule
from megappo.models.rope import Rope, read_rope
from megappo.registry import did_you_mean

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)
_CHECKED = (
    "model_type",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "tie_word_embeddings",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "quantization_config",
    "auto_map",
    "dtype",
    "torch_dtype",
)
_HARMLESS = frozenset(
    {
        # Names and ids.
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "label2id",
        "num_labels",
        "pad_token_id",
        "problem_type",
        "tokenizer_class",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        # Switches of transformers' own code.
        "_attn_implementation_autoset",
        "attn_implementation",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "use_cache",
        # Training from scratch. Dropout is always off here: PPO needs the same log-prob twice.
        "attention_dropout",
        "initializer_range",
    }
)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The architecture of a decoder with RMSNorm, SwiGLU and RoPE, dense or with experts."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    """Of the MLP in layers without experts."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the embedding in the folder, without padding of ours."""
    max_positions: int
    norm_eps: float
    tied: bool
    """The output projection is the embedding."""
    qkv_bias: bool
    qk_norm: bool
    rope: Rope
    dtype: str
    """Of the weights in the folder: `float32`, `bfloat16` or `float16`."""
    num_experts: int = 0
    """Experts of each layer that has them; 0 for a dense model, as are the next three fields."""
    experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    """Of one expert's MLP."""
    moe_layers: tuple[bool, ...] = ()
    """[num_layers] True where experts stand in place of the MLP."""
    norm_topk_prob: bool = False
    """The weights of a token's experts are divided by their sum."""
    shared_ffn_hidden_size: int = 0
    """Of the experts that every token passes in layers with experts, as one MLP; 0 for none."""
    router: RouterRule = PLAIN_SOFTMAX
    expert_names: ExpertNames = USUAL_NAMES
    latent: Latent | None = None
    """Multi-head latent attention; None for the usual kind."""
    dropped_layers: int = 0
    """Layers after the model's own that predict several tokens (MTP), if the folder has them: they
    are neither trained nor written."""

    def has_experts(self, layer: int) -> bool:
        """Whether experts stand in place of the MLP of a layer, counted from 0."""
        return self.num_experts > 0 and self.moe_layers[layer]

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that are rotated."""
        if self.latent is not None:
            return self.latent.rotary_dim
        return int(self.head_dim * self.rope.fraction)


def load_spec(
    folder: str | Path, *, trust_remote_code: bool = False, files: bool = True
) -> ModelSpec:
    """Reads and checks a Hugging Face model folder.

    Args:
        folder: Holds config.json, safetensors weights and a tokenizer.
        trust_remote_code: Accept a folder that brings modelling code of its own. That code is not
            run here; the flag says that the architecture is nevertheless the one of `model_type`.
        files: Look whether weights and tokenizer are there; else only config.json is read.

    Raises:
        ModelError: a part is missing, or a setting is unknown or not supported.
    """
    folder = Path(folder)
    config = _read_config(folder)
    if files:
        check_weight_files(folder)
        check_tokenizer_files(folder)
    kind = config.get("model_type")
    if kind in REFUSED:
        raise ModelError(f"{folder}: model_type {kind!r} is not supported: {REFUSED[kind]}")
    if kind not in FAMILIES:
        raise ModelError(
            f"{folder}: model_type {kind!r} is not supported{did_you_mean(str(kind), FAMILIES)}"
        )
    try:
        _check_code(config, trust_remote_code)
        return spec_from_config(config)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise ModelError(
            f"{folder / 'config.json'} has a value of a wrong kind: {type(error).__name__}: {error}"
        ) from error


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The architecture that the content of a `config.json` describes.

    Raises:
        ModelError: a setting is missing, unknown or not supported.
    """
    family = FAMILIES[config["model_type"]]
    _check_settings(config, family)
    fields = {
        "model_type": config["model_type"],
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": _kv_heads(config, family),
        "vocab_size": config["vocab_size"],
        "max_positions": config["max_position_embeddings"],
        "norm_eps": float(config["rms_norm_eps"]),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": family.qkv_bias,
        "qk_norm": family.qk_norm,
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    } | family.fields(config)
    fields["rope"] = read_rope(
        config,
        default_theta=family.default_theta,
        default_fraction=family.rotary_fraction,
        latent="latent" in fields,
    )
    return ModelSpec(**{"head_dim": _head_dim(config)} | fields)


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ModelError(
            f"model folder {folder} does not exist; give the path of a downloaded Hugging Face "
            "model"
        )
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json, so it is not a Hugging Face model folder")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def check_weight_files(folder: Path) -> None:
    """Looks whether all files of weights are there; none is opened.

    Raises:
        ModelError: one is missing, or there is no index of them.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} is no index of weights: {error!r}") from error
        missing = sorted(s for s in shards if not (folder / s).is_file())
        if missing:
            raise ModelError(f"{index} lists files that are not there: {', '.join(missing)}")
    elif not (folder / WEIGHTS_FILE).is_file():
        raise ModelError(
            f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; weights in another format must "
            "be saved as safetensors first (transformers: model.save_pretrained)"
        )


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a model folder has the files of a tokenizer."""
    return any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)


def check_tokenizer_files(folder: Path) -> None:
    """Looks whether there is a tokenizer; it is not loaded.

    Raises:
        ModelError: there is none.
    """
    if not has_tokenizer(folder):
        raise ModelError(
            f"{folder} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); copy it there"
        )


def _check_code(config: Mapping[str, Any], trust_remote_code: bool) -> None:
    if config.get("auto_map") and not trust_remote_code:
        raise ModelError(
            f"config.json names code of its own (auto_map={config['auto_map']}); set "
            "trust_remote_code=true (convert: --trust-remote-code) if it computes the same as "
            f"model_type {config['model_type']!r}"
        )


def _check_settings(config: Mapping[str, Any], family: Family) -> None:
    missing = [key for key in _REQUIRED if config.get(key) is None]
    if missing:
        raise ModelError(f"config.json lacks {', '.join(missing)}")
    known = _HARMLESS.union(_REQUIRED, _CHECKED, family.keys)
    unknown = {key: value for key, value in config.items() if key not in known and value}
    if unknown:
        listed = ", ".join(f"{key}={value!r}" for key, value in sorted(unknown.items()))
        raise ModelError(
            f"config.json has settings that a {config['model_type']} model does not have: "
            f"{listed}; remove what has no effect on the model, use another model otherwise"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {config['hidden_act']!r} is not supported: only 'silu' is")
    if config.get("quantization_config"):
        raise ModelError("quantized weights cannot be trained; use the original model")
    family.check(config)


def _kv_heads(config: Mapping[str, Any], family: Family) -> int:
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if kv_heads is None and family.kv_heads_default_to_heads:
        kv_heads = heads
    if kv_heads is None:
        raise ModelError("config.json lacks num_key_value_heads")
    if heads % kv_heads:
        raise ModelError(
            f"num_attention_heads must be a multiple of num_key_value_heads: {heads} and {kv_heads}"
        )
    return int(kv_heads)


def _head_dim(config: Mapping[str, Any]) -> int:
    if config.get("head_dim") is not None:
        return int(config["head_dim"])
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if hidden % heads:
        raise ModelError(
            f"without head_dim, hidden_size must be a multiple of num_attention_heads: {hidden} "
            f"and {heads}"
        )
    return int(hidden // heads)
