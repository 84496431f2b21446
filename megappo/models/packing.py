"""Lays the sequences of a micro-batch out for a forward pass, and takes per-token results back.

Legend: B sequences, L padded length of one, S tokens of the whole layout, T longest response, CP
context-parallel ranks. A sequence is a prompt followed by its response.

*Packed*, the sequences stand end to end in one row [1, S]; attention is block-diagonal. *Padded*,
they are the rows of [B, L] with one common L. Either way a sequence is a run of positions of the
*whole layout*, counted row by row, and this rank holds the positions `local` of it: all of them
without context parallelism, a zigzag share of every sequence with it.

Padding is zeros at the end of a sequence, where a causal mask keeps it from real tokens, or one
extra sequence at the end of a packed row. Nothing reads its results. An empty micro-batch is one
such sequence and nothing else, so that a rank without samples still runs the same collectives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megappo.distributed.context_parallel import zigzag

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


FP8_TOKEN_MULTIPLE = {"tensorwise": 16, "delayed": 16, "blockwise": 128, "mxfp8": 32}
"""Transformer Engine's fp8 products want a number of tokens that its scaling blocks divide."""


def token_multiple(*, tp: int, sequence_parallel: bool, fp8_recipe: str | None) -> int:
    """Tokens of a forward pass on one rank are a multiple of this.

    Sequence parallelism splits them over TP; fp8 products want multiples of their own on each part.
    """
    split = tp if sequence_parallel else 1
    return split * (FP8_TOKEN_MULTIPLE[fp8_recipe] if fp8_recipe else 1)


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """What a layout asks of lengths, and this rank's share of a sequence."""

    multiple_of: int = 1
    """Tokens on each rank are a multiple of this: TP under sequence parallelism."""
    cp: int = 1
    cp_rank: int = 0
    packed: bool = True

    @property
    def sequence_multiple(self) -> int:
        """Every sequence is padded to a multiple of this."""
        pieces = 2 * self.cp if self.cp > 1 else 1
        return pieces if self.packed else pieces * self.multiple_of

    @property
    def row_multiple(self) -> int:
        """A packed row, over all CP ranks, is padded to a multiple of this."""
        return math.lcm(self.sequence_multiple, self.cp * self.multiple_of)

    def padded(self, length: int) -> int:
        """Positions that a sequence of `length` tokens takes up in a packed row."""
        return -(-length // self.sequence_multiple) * self.sequence_multiple


@dataclass(frozen=True, kw_only=True)
class PackedInput:
    """One forward pass's input on this rank."""

    tokens: Tensor
    """[1, S / CP] packed or [B, L / CP] padded, int64."""
    labels: Tensor
    """As `tokens`: the token after each position within its sequence, 0 after the last one."""
    position_ids: Tensor
    """As `tokens`, from 0 in each sequence."""
    segments: Tensor
    """As `tokens`, int32: number of the sequence from 1, 0 on padding."""
    lengths: tuple[int, ...]
    """[n] positions of each sequence of the whole layout, padding and padding sequence included."""
    real_lengths: tuple[int, ...]
    """[B] tokens of each real sequence."""
    local: Tensor
    """[S / CP] int64 on the CPU: positions of the whole layout that this rank holds."""
    packed: bool

    @property
    def num_sequences(self) -> int:
        """B: sequences that are not padding."""
        return len(self.real_lengths)

    @property
    def total_tokens(self) -> int:
        """S / CP: positions of the forward pass on this rank."""
        return int(self.tokens.numel())

    @property
    def starts(self) -> tuple[int, ...]:
        """[n] first position of each sequence in the whole layout."""
        return tuple(accumulate(self.lengths, initial=0))[:-1]

    @property
    def max_seqlen(self) -> int:
        """Longest sequence, exactly.

        Megatron takes RoPE positions as offsets into the whole row when this number equals S
        (rope_utils.py:211), which is right for one sequence only.
        """
        return max(self.lengths)

    @cached_property
    def index_of(self) -> Tensor:
        """[S] int64 on the CPU: where this rank holds a position of the whole layout, else -1."""
        index = torch.full((sum(self.lengths),), -1)
        index[self.local] = torch.arange(len(self.local))
        return index


def pack(
    sequences: Sequence[Tensor | Sequence[int]],
    alignment: Alignment | None = None,
    *,
    device: torch.device | str = "cpu",
) -> PackedInput:
    """Lays out sequences of token ids.

    Args:
        sequences: Token ids of each, at least one apiece; may be empty.
        alignment: What the layout asks for; None for a packed row on one rank.
        device: Where the tensors go.
    """
    align = alignment or Alignment()
    rows = [torch.as_tensor(s, dtype=torch.long).cpu().reshape(-1) for s in sequences]
    assert all(len(row) for row in rows), "a sequence must have at least one token"
    lengths = _layout(tuple(len(row) for row in rows), align)
    whole = sum(lengths)
    tokens, labels, positions, segments = (torch.zeros(whole, dtype=torch.long) for _ in range(4))
    for number, start in enumerate(accumulate(lengths, initial=0)):
        if number == len(lengths):
            break
        positions[start : start + lengths[number]] = torch.arange(lengths[number])
        if number < len(rows):
            row = rows[number]
            tokens[start : start + len(row)] = row
            labels[start : start + len(row) - 1] = row[1:]
            segments[start : start + len(row)] = number + 1
    local = zigzag(lengths, align.cp, align.cp_rank)
    shape = (1, -1) if align.packed else (len(lengths), -1)
    return PackedInput(
        tokens=tokens[local].view(shape).to(device),
        labels=labels[local].view(shape).to(device),
        position_ids=positions[local].view(shape).to(device),
        segments=segments[local].view(shape).int().to(device),
        lengths=lengths,
        real_lengths=tuple(len(row) for row in rows),
        local=local,
        packed=align.packed,
    )


def _layout(lengths: tuple[int, ...], align: Alignment) -> tuple[int, ...]:
    """Padded length of each sequence, and of the padding sequence where one is needed."""
    padded = tuple(align.padded(n) for n in lengths)
    if not align.packed:
        return (max(padded),) * len(padded) if padded else (align.sequence_multiple,)
    # The padding sequence is cut like the others, so its length is a multiple of theirs too.
    missing = -sum(padded) % align.row_multiple if padded else align.row_multiple
    return (*padded, missing) if missing else padded


def packed_seq_params(packed: PackedInput) -> PackedSeqParams | None:
    """The boundaries of a packed row in the form that Megatron's attention takes; None if padded.

    Padding counts as part of its sequence: it comes last and the mask is causal.
    """
    if not packed.packed:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    starts = [0, *accumulate(packed.lengths)]
    boundaries = torch.tensor(starts, dtype=torch.int32, device=packed.tokens.device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=boundaries,
        cu_seqlens_kv_padded=boundaries,
        max_seqlen_q=packed.max_seqlen,
        max_seqlen_kv=packed.max_seqlen,
    )


def response_positions(
    starts: Sequence[int], prompt_lengths: Sequence[int], response_lengths: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the layout predicts each response token.

    The distribution of a sequence's token i, and the value of the state in which it is chosen, are
    the model's output at token i - 1. So response token t of a prompt of p tokens is read at
    p - 1 + t from the start of its sequence.

    Args:
        starts: [B] first position of each sequence in the whole layout.
        prompt_lengths: [B] tokens of each prompt, at least one.
        response_lengths: [B] tokens of each response, may be 0.

    Returns:
        Positions in the whole layout, sequence numbers b and response tokens t, each
        [total response tokens] int64 on the CPU.
    """
    assert all(p > 0 for p in prompt_lengths), "a response needs a prompt token that predicts it"
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


@dataclass(frozen=True, kw_only=True)
class ResponseIndex:
    """Which of this rank's results belong to which response token."""

    rows: Tensor
    """[m] where this rank holds the prediction of a response token."""
    samples: Tensor
    """[m] b of that token."""
    steps: Tensor
    """[m] t of that token."""
    owned: Tensor
    """[B, T] bool on the CPU: the response tokens that are predicted on this rank."""

    def scatter(self, flat: Tensor) -> Tensor:
        """This rank's results [S / CP] -> [B, T], 0 where not owned; differentiable."""
        out = flat.new_zeros(self.owned.shape)
        index = (self.samples.to(flat.device), self.steps.to(flat.device))
        return out.index_put(index, flat[self.rows.to(flat.device)])


def response_index(
    packed: PackedInput,
    *,
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    width: int,
) -> ResponseIndex:
    """Finds each response token's result.

    Args:
        packed: of the same sequences.
        prompt_lengths: [B]
        response_lengths: [B]
        width: T, at least the longest response.
    """
    count = packed.num_sequences
    positions, samples, steps = response_positions(
        packed.starts[:count], prompt_lengths, response_lengths
    )
    rows = packed.index_of[positions]
    here = rows >= 0
    owned = torch.zeros(count, width, dtype=torch.bool)
    owned[samples[here], steps[here]] = True
    return ResponseIndex(rows=rows[here], samples=samples[here], steps=steps[here], owned=owned)


def last_tokens(packed: PackedInput, flat: Tensor) -> Tensor:
    """Result at each real sequence's last token, [B]; 0 where another rank holds it."""
    starts = packed.starts[: packed.num_sequences]  # without that of a padding sequence
    ends = [start + n - 1 for start, n in zip(starts, packed.real_lengths, strict=True)]
    rows = packed.index_of[torch.tensor(ends, dtype=torch.long)].to(flat.device)
    return torch.where(rows >= 0, flat[rows.clamp(min=0)], torch.zeros_like(rows, dtype=flat.dtype))
