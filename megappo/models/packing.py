"""Packs the sequences of a micro-batch into one row, and takes per-token results apart again.

Legend: S tokens of the row, B real sequences, T longest response. A sequence is a prompt followed
by its response. The row is padded, where the layout needs it, by one extra sequence of zeros at the
end: it attends to itself alone and nothing reads its results. An empty micro-batch is such a
sequence and nothing else, so that a rank without samples still runs the same collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


@dataclass(frozen=True, kw_only=True)
class PackedInput:
    """One row of sequences, ready for a forward pass."""

    tokens: Tensor
    """[1, S] int64"""
    position_ids: Tensor
    """[1, S] int64, from 0 in each sequence."""
    cu_seqlens: Tensor
    """[n + 1] int32, where each sequence starts, then S."""
    max_seqlen: int
    """Longest sequence, exactly: Megatron takes RoPE positions as offsets into the whole row
    when this number equals S (rope_utils.py:211), which is right for one sequence only."""
    lengths: tuple[int, ...]
    """[n] tokens of each sequence, the padding sequence included."""
    num_sequences: int
    """B: sequences that are not padding."""

    @property
    def total_tokens(self) -> int:
        """S."""
        return int(self.tokens.shape[1])


def pack(
    sequences: Sequence[Tensor | Sequence[int]],
    *,
    multiple_of: int = 1,
    device: torch.device | str = "cpu",
) -> PackedInput:
    """Joins sequences of token ids.

    Args:
        sequences: Token ids of each, at least one apiece; may be empty.
        multiple_of: S is a multiple of this (of TP under sequence parallelism).
        device: Where the tensors go.
    """
    rows = [torch.as_tensor(s, dtype=torch.long).cpu().reshape(-1) for s in sequences]
    assert all(len(row) for row in rows), "a sequence must have at least one token"
    total = sum(len(row) for row in rows)
    padding = -total % multiple_of if rows else multiple_of
    if padding:
        rows.append(torch.zeros(padding, dtype=torch.long))
    lengths = tuple(len(row) for row in rows)
    return PackedInput(
        tokens=torch.cat(rows)[None].to(device),
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None].to(device),
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
        max_seqlen=max(lengths),
        lengths=lengths,
        num_sequences=len(sequences),
    )


def packed_seq_params(packed: PackedInput) -> PackedSeqParams:
    """The same boundaries in the form that Megatron's attention takes."""
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=packed.cu_seqlens,
        cu_seqlens_kv=packed.cu_seqlens,
        max_seqlen_q=packed.max_seqlen,
        max_seqlen_kv=packed.max_seqlen,
    )


def labels(packed: PackedInput) -> Tensor:
    """The token after each position within its sequence, [1, S] int64; 0 after the last one."""
    shifted = torch.roll(packed.tokens, -1, dims=1)
    shifted[0, packed.cu_seqlens[1:].long() - 1] = 0
    return shifted


def response_positions(
    prompt_lengths: Sequence[int], response_lengths: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the row predicts each response token.

    The distribution of a sequence's token i, and the value of the state in which it is chosen, are
    the model's output at token i - 1. So response token t of a prompt of p tokens is read at
    p - 1 + t from the start of its sequence.

    Args:
        prompt_lengths: [B] tokens of each prompt, at least one.
        response_lengths: [B] tokens of each response, may be 0.

    Returns:
        Positions in the row, sequence numbers b and response tokens t, each [total response tokens]
        int64 on the CPU.
    """
    assert all(p > 0 for p in prompt_lengths), "a response needs a prompt token that predicts it"
    totals = [p + r for p, r in zip(prompt_lengths, response_lengths, strict=True)]
    starts = [0, *accumulate(totals)][:-1]
    steps = [torch.arange(r) for r in response_lengths]
    none = torch.empty(0, dtype=torch.long)
    positions = [
        start + p - 1 + step for start, p, step in zip(starts, prompt_lengths, steps, strict=True)
    ]
    samples = [torch.full_like(step, b) for b, step in enumerate(steps)]
    return (
        torch.cat([none, *positions]),
        torch.cat([none, *samples]),
        torch.cat([none, *steps]),
    )


def last_positions(packed: PackedInput) -> Tensor:
    """Position in the row of each real sequence's last token, [B] int64: where a reward is read."""
    return packed.cu_seqlens[1 : packed.num_sequences + 1].long() - 1


def scatter_responses(
    flat: Tensor,
    *,
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    width: int,
) -> Tensor:
    """Takes each response token's result out of a packed row; differentiable.

    Args:
        flat: [S] one number a token of the row.
        prompt_lengths: [B]
        response_lengths: [B]
        width: T, at least the longest response.

    Returns:
        [B, T] of `flat`'s dtype, 0 where there is no response token.
    """
    positions, samples, steps = response_positions(prompt_lengths, response_lengths)
    out = flat.new_zeros(len(prompt_lengths), width)
    index = (samples.to(flat.device), steps.to(flat.device))
    return out.index_put(index, flat[positions.to(flat.device)])
