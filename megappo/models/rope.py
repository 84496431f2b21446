"""Rotary position embeddings: what `config.json` says of them, and the frequencies that follow.

Two spellings are read, that of transformers 5 (`rope_parameters`) and of 4 (`rope_theta` with
`rope_scaling`). Types: default, linear, llama3. Left out: dynamic and longrope, whose frequencies
depend on the sequence, and yarn, which also rescales attention; all three are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megappo.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_THETA = 10000.0
"""Of all supported families in transformers, where the config names none."""

_PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding over the whole head dim."""

    kind: str
    """`default`, `linear` or `llama3`."""
    theta: float
    parameters: Mapping[str, float]
    """The numbers of `kind`, by their names in Hugging Face configs."""


def read_rope(config: Mapping[str, Any]) -> Rope:
    """Reads either spelling.

    Raises:
        ModelError: an unknown type or parameter, a partial rotation, or two spellings that differ.
    """
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    thetas = {
        float(source["rope_theta"])
        for source in (config, new, old)
        if source.get("rope_theta") is not None
    }
    if len(thetas) > 1 or (new and old and _without_theta(new) != _without_theta(old)):
        raise ModelError(
            f"config.json describes RoPE twice and differently: rope_theta={thetas}, "
            f"rope_parameters={new}, rope_scaling={old}; keep the right one"
        )
    settings = _without_theta(new or old)
    kind = settings.pop("rope_type")
    partial = settings.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor={partial} is not supported: only 1.0 is")
    _check_parameters(kind, settings)
    return Rope(
        kind=kind,
        theta=thetas.pop() if thetas else DEFAULT_THETA,
        parameters={name: float(settings[name]) for name in _PARAMETERS[kind]},
    )


def _without_theta(settings: Mapping[str, Any]) -> dict[str, Any]:
    rest = {k: v for k, v in settings.items() if k not in ("rope_theta", "type", "rope_type")}
    rest["rope_type"] = settings.get("rope_type", settings.get("type", "default"))
    return rest


def _check_parameters(kind: str, settings: Mapping[str, Any]) -> None:
    if kind not in _PARAMETERS:
        raise ModelError(
            f"RoPE type {kind!r} is not supported; supported: {', '.join(sorted(_PARAMETERS))}"
        )
    expected = set(_PARAMETERS[kind])
    if set(settings) != expected:
        raise ModelError(
            f"RoPE type {kind!r} takes exactly the parameters {sorted(expected)}, config.json "
            f"has {sorted(settings)}"
        )


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position of each pair of dims, [head_dim / 2] float32.

    `llama3` is as in Llama 3.1's reference code: wavelengths beyond the original context over
    `low_freq_factor` are divided by `factor`, those short of it over `high_freq_factor` are kept,
    and between the two the factor is blended. Megatron has fixed numbers in place of the config's.
    """
    import torch

    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return frequencies
    scaled = frequencies / rope.parameters["factor"]
    if rope.kind == "linear":
        return scaled
    low, high = rope.parameters["low_freq_factor"], rope.parameters["high_freq_factor"]
    context = rope.parameters["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    kept = ((context / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.parameters["factor"] + kept * frequencies
