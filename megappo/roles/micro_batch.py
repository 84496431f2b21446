"""Samples of one forward pass, laid out for it, and the way back from tokens to [B, T].

Legend: b samples of the micro-batch, S / CP positions on this rank, T longest response of the whole
batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.models.packing import (
    Alignment,
    PackedInput,
    ResponseIndex,
    last_tokens,
    pack,
    response_index,
)
from megappo.types import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One forward pass. Tensors of `samples` stay on the CPU, the others are on the device."""

    indices: tuple[int, ...]
    """Rows of the batch that this was cut from."""
    samples: RolloutBatch
    packed: PackedInput
    response_index: ResponseIndex

    @property
    def num_tokens(self) -> int:
        """S / CP, padding included."""
        return self.packed.total_tokens

    @property
    def owned_mask(self) -> Tensor:
        """[b, T] bool: trained tokens whose results are on this rank.

        Over the context-parallel ranks each trained token is owned once.
        """
        return self.samples.response_mask & self.response_index.owned

    def to_responses(self, flat: Tensor) -> Tensor:
        """Results [S / CP] of predicting positions -> [b, T], 0 where this rank has none."""
        return self.response_index.scatter(flat.flatten())

    def after_last(self, flat: Tensor) -> Tensor:
        """[S / CP] -> [b], at the state after each sample's last token; 0 on other CP ranks."""
        return last_tokens(self.packed, flat.flatten())


def cut(
    batch: RolloutBatch,
    micro_batches: Iterable[Sequence[int]],
    *,
    device: torch.device,
    alignment: Alignment,
) -> list[MicroBatch]:
    """Lays out the given rows of a batch, one `MicroBatch` a list of rows.

    Args:
        batch: [B] samples.
        micro_batches: rows of each forward pass.
        device: where the model is.
        alignment: what the model's layout asks of lengths.
    """
    return [_cut_one(batch.select(rows), tuple(rows), device, alignment) for rows in micro_batches]


def _cut_one(
    samples: RolloutBatch, rows: tuple[int, ...], device: torch.device, alignment: Alignment
) -> MicroBatch:
    sequences = [
        [*p.token_ids, *c.token_ids]
        for p, c in zip(samples.prompts, samples.completions, strict=True)
    ]
    packed = pack(sequences, alignment, device=device)
    return MicroBatch(
        indices=rows,
        samples=samples,
        packed=packed,
        response_index=response_index(
            packed,
            prompt_lengths=[len(p.token_ids) for p in samples.prompts],
            response_lengths=samples.response_lengths,
            width=samples.responses.shape[1],
        ),
    )
