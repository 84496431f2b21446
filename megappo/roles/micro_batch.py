"""Samples of one forward pass, packed end to end, and the way back from tokens to [B, T].

Legend: b samples of the micro-batch, S packed tokens, T longest response of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.models.packing import PackedInput, labels, last_positions, pack, scatter_responses
from megappo.types import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One forward pass. Tensors of `samples` stay on the CPU, the others are on the device."""

    indices: tuple[int, ...]
    """Rows of the batch that this was cut from."""
    samples: RolloutBatch
    packed: PackedInput
    labels: Tensor
    """[S] the token after each position, within its sequence."""

    @property
    def num_tokens(self) -> int:
        """S."""
        return self.packed.total_tokens

    def to_responses(self, flat: Tensor) -> Tensor:
        """[S] of predicting positions -> [b, T] of response tokens, 0 where padded."""
        return scatter_responses(
            flat,
            prompt_lengths=[len(p.token_ids) for p in self.samples.prompts],
            response_lengths=self.samples.response_lengths,
            width=self.samples.responses.shape[1],
        )

    def after_last(self, flat: Tensor) -> Tensor:
        """[S] -> [b], at the state after each sample's last token."""
        return flat[last_positions(self.packed)]


def cut(
    batch: RolloutBatch,
    micro_batches: Iterable[Sequence[int]],
    *,
    device: torch.device,
    multiple_of: int,
) -> list[MicroBatch]:
    """Packs the given rows of a batch, one `MicroBatch` a list of rows.

    Args:
        batch: [B] samples.
        micro_batches: rows of each forward pass.
        device: where the model is.
        multiple_of: packed length is padded to a multiple (TP under sequence parallel).
    """
    return [
        _cut_one(batch.select(rows), tuple(rows), device, multiple_of) for rows in micro_batches
    ]


def _cut_one(
    samples: RolloutBatch, rows: tuple[int, ...], device: torch.device, multiple_of: int
) -> MicroBatch:
    sequences = [
        [*p.token_ids, *c.token_ids]
        for p, c in zip(samples.prompts, samples.completions, strict=True)
    ]
    packed = pack(sequences, multiple_of=multiple_of, device=device)
    return MicroBatch(indices=rows, samples=samples, packed=packed, labels=labels(packed)[0])
