"""Model operations of training, and MFU: what the model needs, whatever the layout recomputes.

A forward pass over n tokens costs what `data.cost.SequenceCost` counts (Narayanan et al. 2021,
arXiv 2104.04473, appendix, with the causal half of attention). A backward pass costs twice that, so
training costs three times a forward pass. Recomputation is not counted: model FLOPs utilization, as
Chowdhery et al. 2022 (arXiv 2204.02311, appendix B) define it, is

    MFU = model operations / (seconds x devices x peak operations a second of a device)

A critic has a value head in place of the projection to the vocabulary, which is taken off.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from megappo.data.cost import SequenceCost
from megappo.models.spec import ModelSpec

TRAIN_FACTOR = 3
"""Forward pass, and a backward pass of twice its work."""

Head = Literal["lm", "value"]


def forward_flops(spec: ModelSpec, lengths: Iterable[int], *, head: Head = "lm") -> float:
    """Operations of one forward pass over sequences of these lengths (tokens each)."""
    cost = SequenceCost.of_model(spec)
    projection = 2 * spec.hidden_size * spec.vocab_size if head == "value" else 0
    return float(sum(cost(n) - n * projection for n in lengths))


def train_flops(spec: ModelSpec, lengths: Iterable[int], *, head: Head = "lm") -> float:
    """Operations of one forward and one backward pass over sequences of these lengths."""
    return TRAIN_FACTOR * forward_flops(spec, lengths, head=head)


def train_flops_per_token(spec: ModelSpec, seq_len: int, *, head: Head = "lm") -> float:
    """Operations of training on one token of a sequence of `seq_len`, on average."""
    return train_flops(spec, [seq_len], head=head) / seq_len


def mfu(flops: float, *, seconds: float, num_devices: int, peak_flops_per_s: float) -> float:
    """Share of the devices' peak that model operations took; 0 where no time passed.

    Args:
        flops: model operations of all devices together.
        seconds: that they took.
        num_devices: that took part.
        peak_flops_per_s: of one device, e.g. `constants.Gpu.flops_per_s`.
    """
    return flops / (seconds * num_devices * peak_flops_per_s) if seconds > 0 else 0.0
