"""Parts of an architecture that only some families have, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Keys and values of all heads are projected up from one small vector a token, queries too where
    they have a rank. A head's query and key are a part without position and a rotated part, whose
    key all heads share.
    """

    query_rank: int | None
    """Of the query's small vector; None where queries are projected from the hidden state."""
    key_value_rank: int
    plain_dim: int
    """Dims of a head's query and key that carry no position."""
    rotary_dim: int
    """Dims of a head's query and key that are rotated, in interleaved pairs."""
    value_dim: int

    @property
    def head_dim(self) -> int:
        """Dims of a head's query and key."""
        return self.plain_dim + self.rotary_dim


@dataclass(frozen=True, kw_only=True)
class RouterRule:
    """How a router scores experts and chooses among them."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    has_bias: bool = False
    """A number an expert is added to its score in the choice alone; it is not trained here."""
    num_groups: int = 1
    """Groups of experts; a token takes experts of a few groups only."""
    groups_per_token: int = 1
    best_of_group: int = 1
    """A group's score is the sum of its best scores, so many."""
    scale: float = 1.0
    """Factor on the weights of the chosen experts."""


PLAIN_SOFTMAX = RouterRule()


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """What a family calls its experts' tensors in a Hugging Face folder."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


USUAL_NAMES = ExpertNames()
