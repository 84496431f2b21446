"""What a family is: how its `config.json` differs from the others, and what in it is refused.

A setting that this trainer would compute differently from the family's own code is an error. A
setting is never dropped: a key is used, checked, known to be harmless, or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megappo.errors import ModelError
from megappo.registry import Registry

ConfigJson = Mapping[str, Any]
"""The content of a `config.json`."""


def no_fields(config: ConfigJson) -> dict[str, Any]:
    """Of a family that has nothing beyond what all have."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type` of Hugging Face."""

    qkv_bias: bool
    """Query, key and value projections have a bias, the output projection has none."""
    qk_norm: bool
    """Queries and keys pass an RMSNorm over the head dim before RoPE."""
    keys: frozenset[str]
    """Config keys that only this family has; `check` looks at each that matters."""
    check: Callable[[ConfigJson], None]
    """Raises `ModelError` for a setting that is not supported."""
    kv_heads_default_to_heads: bool = False
    """An absent `num_key_value_heads` means as many as `num_attention_heads`."""
    fields: Callable[[ConfigJson], dict[str, Any]] = no_fields
    """Fields of the `ModelSpec` that only some families have, or that replace what all have."""
    default_theta: float = 10000.0
    """RoPE's base in transformers where the config names none."""
    rotary_fraction: float | None = None
    """Share of a head's dims that is rotated where the config names none; None: always all."""


FAMILIES: Registry[Family] = Registry("model_type")


def refuse(config: ConfigJson, key: str, why: str) -> None:
    """Raises for a key that is set to anything but false, null or nothing.

    Raises:
        ModelError: with the key, its value and the reason.
    """
    if config.get(key):
        raise ModelError(
            f"config.json sets {key}={config[key]!r}, which is not supported: {why}; "
            "use a model without it"
        )


def require(config: ConfigJson, *keys: str) -> None:
    """Raises for keys that are absent, null or 0.

    Raises:
        ModelError: with their names.
    """
    missing = [key for key in keys if not config.get(key)]
    if missing:
        raise ModelError(f"config.json lacks {', '.join(missing)}")


def check_choice(num_experts: int, chosen: int, *, normalized: bool) -> None:
    """Raises when a token cannot choose `chosen` experts, or its router would have no gradient.

    Raises:
        ModelError: with the numbers.
    """
    if not 1 <= chosen <= num_experts:
        raise ModelError(
            f"num_experts_per_tok must be between 1 and the number of experts: {chosen} of "
            f"{num_experts}"
        )
    if chosen == 1 and normalized:
        raise ModelError(
            "num_experts_per_tok=1 with norm_topk_prob=true gives every expert the weight 1, so "
            "the router has no gradient; this is not supported: use norm_topk_prob=false"
        )


def refuse_sliding_window(config: ConfigJson, window: int | None) -> None:
    """Raises when attention over `window` tokens would differ from full attention.

    Args:
        config: The whole config.
        window: Tokens that a position sees, None for all.

    Raises:
        ModelError: the window is shorter than the longest sequence.
    """
    longest = config["max_position_embeddings"]
    if window is not None and window < longest:
        raise ModelError(
            f"sliding window attention is not supported: config.json limits attention to {window} "
            f"tokens while max_position_embeddings is {longest}; set the window to null if the "
            "model was trained with full attention"
        )


def refuse_windowed_layers(config: ConfigJson) -> None:
    """Raises when a Qwen config turns on sliding windows for some layers.

    Raises:
        ModelError: `layer_types` names a layer that is not `full_attention`, or
            `use_sliding_window` covers at least one layer with a window that matters.
    """
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise ModelError(
            f"layer_types has {', '.join(sorted(kinds))}; only full_attention is supported: "
            "use a model without sliding windows"
        )
    first = config.get("max_window_layers", 28)
    if config.get("use_sliding_window") and first < config["num_hidden_layers"]:
        refuse_sliding_window(config, config.get("sliding_window", 4096))
