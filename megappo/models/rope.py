"""Rotary position embeddings: what `config.json` says of them, and the frequencies that follow.

Two spellings are read, that of transformers 5 (`rope_parameters`) and of 4 (`rope_theta` with
`rope_scaling`). Types: default, linear, llama3, yarn. Left out: dynamic and longrope, whose
frequencies depend on the length of the sequence, and proportional, which none of the supported
families has; all three are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megappo.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_THETA = 10000.0
"""Of most families in transformers, where the config names none."""

_PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_DEFAULTS = {"yarn": {"beta_fast": 32.0, "beta_slow": 1.0}}
"""Numbers that may be absent, and what they are then."""
_LATENT_YARN = ("mscale", "mscale_all_dim")
"""Further ones of yarn in latent attention."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding over a head's dims, or the first of them."""

    kind: str
    """`default`, `linear`, `llama3` or `yarn`."""
    theta: float
    parameters: Mapping[str, float] = field(hash=False)
    """The numbers of `kind`, by their names in Hugging Face configs."""
    fraction: float = 1.0
    """Share of the dims that is rotated."""

    @property
    def embedding_scale(self) -> float:
        """Factor on sines and cosines; yarn's, without `mscale` (arXiv 2309.00071, eq. 22)."""
        if self.kind != "yarn" or "mscale" in self.parameters:
            return 1.0  # with it, read_rope has made sure that its two parts cancel
        return _yarn_scale(self.parameters["factor"], 1.0)

    @property
    def score_scale(self) -> float:
        """Factor on query-key products in latent attention (DeepSeek-V2's code)."""
        if "mscale_all_dim" not in self.parameters:
            return 1.0
        return _yarn_scale(self.parameters["factor"], self.parameters["mscale_all_dim"]) ** 2


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def read_rope(
    config: Mapping[str, Any],
    *,
    default_theta: float = DEFAULT_THETA,
    default_fraction: float | None = None,
    latent: bool = False,
) -> Rope:
    """Reads either spelling.

    Args:
        config: The whole config.
        default_theta: Base where the config names none.
        default_fraction: Share of a head's dims that is rotated where the config names none; None
            for a family that has no such setting.
        latent: Whether the model has latent attention.

    Raises:
        ModelError: an unknown type or parameter, a partial rotation of a family that has none, or
            two spellings that differ.
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
    inside = settings.pop("partial_rotary_factor", None)
    fraction = _fraction({inside, config.get("partial_rotary_factor")} - {None}, default_fraction)
    return Rope(
        kind=kind,
        theta=thetas.pop() if thetas else default_theta,
        parameters=_checked(kind, settings, latent=latent),
        fraction=fraction,
    )


def _without_theta(settings: Mapping[str, Any]) -> dict[str, Any]:
    rest = {k: v for k, v in settings.items() if k not in ("rope_theta", "type", "rope_type")}
    rest["rope_type"] = settings.get("rope_type", settings.get("type", "default"))
    return rest


def _fraction(given: set[float], default: float | None) -> float:
    if default is None:
        if given - {1}:
            raise ModelError(f"partial_rotary_factor={given.pop()} is not supported: only 1.0 is")
        return 1.0
    if len(given) > 1:
        raise ModelError(
            f"config.json gives partial_rotary_factor twice and differently: {sorted(given)}"
        )
    fraction = float(given.pop()) if given else default
    if not 0 < fraction <= 1:
        raise ModelError(f"partial_rotary_factor must be over 0 and at most 1, not {fraction}")
    return fraction


def _checked(kind: str, settings: Mapping[str, Any], *, latent: bool) -> dict[str, float]:
    """The numbers of `kind` with defaults filled in."""
    if kind not in _PARAMETERS:
        raise ModelError(
            f"RoPE type {kind!r} is not supported; supported: {', '.join(sorted(_PARAMETERS))}"
        )
    needed, defaults = _PARAMETERS[kind], _DEFAULTS.get(kind, {})
    if kind == "yarn" and latent:
        needed = (*needed, *_LATENT_YARN)
    given = {name: value for name, value in settings.items() if value is not None}
    if not set(needed) <= set(given) <= {*needed, *defaults}:
        optional = f", and may have {sorted(defaults)}" if defaults else ""
        raise ModelError(
            f"RoPE type {kind!r} takes exactly the parameters {sorted(needed)}{optional}; "
            f"config.json has {sorted(given)}"
        )
    numbers = defaults | {name: float(value) for name, value in given.items()}
    if latent and numbers.get("mscale") != numbers.get("mscale_all_dim"):
        raise ModelError(
            f"RoPE's mscale={numbers['mscale']} and mscale_all_dim={numbers['mscale_all_dim']} "
            "must be equal: with others rotated dims are scaled, which is not supported"
        )
    return numbers


def inverse_frequencies(rope: Rope, rotary_dim: int) -> Tensor:
    """Radians per position of each pair of dims, [rotary_dim / 2] float32.

    `llama3` is as in Llama 3.1's reference code: wavelengths beyond the original context over
    `low_freq_factor` are divided by `factor`, those short of it over `high_freq_factor` are kept,
    and between the two the factor is blended. Megatron has fixed numbers in place of the config's.
    """
    import torch

    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return frequencies
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, rotary_dim)
    scaled = frequencies / rope.parameters["factor"]
    if rope.kind == "linear":
        return scaled
    low, high = rope.parameters["low_freq_factor"], rope.parameters["high_freq_factor"]
    context = rope.parameters["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    kept = ((context / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.parameters["factor"] + kept * frequencies


def _yarn_frequencies(rope: Rope, rotary_dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2), its ramp over pairs of dims as in the authors' code.

    Pairs that turn more than `beta_fast` times in the original context keep their frequency, those
    that turn less than `beta_slow` times have it divided by `factor`, and a ramp whose ends are
    rounded outwards blends between the two.
    """
    import torch

    parameters = rope.parameters
    context = parameters["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        turn = math.log(context / (times * 2 * math.pi))
        return rotary_dim * turn / (2 * math.log(rope.theta))

    first = max(math.floor(pair_that_turns(parameters["beta_fast"])), 0)
    last = min(math.ceil(pair_that_turns(parameters["beta_slow"])), rotary_dim - 1)
    width = last - first or 0.001
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float32)
    kept = 1 - ((pairs - first) / width).clamp(0.0, 1.0)
    wavelengths = rope.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    divided = 1.0 / (parameters["factor"] * wavelengths)
    return divided * (1 - kept) + (1.0 / wavelengths) * kept
