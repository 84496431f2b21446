"""The section of low-rank adapters: what is trained in place of a model's own weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megappo.config.fields import Problems, opt

LoraTarget = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
"""Megatron's names: queries, keys and values in one; attention output; gate and up; down."""

ALL_TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)


@dataclass(frozen=True, kw_only=True)
class LoraSection:
    """Low-rank adapters; with them the model's own weights stay as they are in the folder."""

    rank: int = opt(
        0, "rank of the adapters; 0: none, the whole model is trained", verl="lora_rank"
    )
    alpha: float = opt(16.0, "the adapters' product is scaled by alpha / rank", verl="lora_alpha")
    dropout: float = opt(
        0.0,
        "share of the adapters' inputs that an update drops; over 0 the first update's ratio to "
        "the old log-probs is not 1",
    )
    target_modules: list[str] = opt(
        list(ALL_TARGETS),
        "which matrix products get one: linear_qkv, linear_proj, linear_fc1, linear_fc2 "
        "(attention in and out, MLP in and out)",
        verl="target_modules",
    )

    def __post_init__(self) -> None:
        p = Problems()
        p.not_negative(rank=self.rank)
        p.positive(alpha=self.alpha)
        p.require(0 <= self.dropout < 1, "dropout", self.dropout, "it must lie in [0, 1)")
        unknown = [name for name in self.target_modules if name not in ALL_TARGETS]
        p.require(
            not unknown,
            "target_modules",
            self.target_modules,
            f"unknown: {', '.join(unknown)}; known: {', '.join(ALL_TARGETS)}",
        )
        p.require(
            bool(self.target_modules),
            "target_modules",
            self.target_modules,
            "name at least one, or set rank=0",
        )
        p.require(
            len(set(self.target_modules)) == len(self.target_modules),
            "target_modules",
            self.target_modules,
            "each may stand there once",
        )
        p.done()
