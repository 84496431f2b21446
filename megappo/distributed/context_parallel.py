"""Context parallelism: which part of each sequence a rank holds, and how the parts come together.

A sequence whose length is a multiple of 2 x CP is cut into 2 x CP chunks, and rank r holds chunks r
and 2 CP - 1 - r ("zigzag"): under a causal mask the early chunk is cheap and the late one dear, so
all ranks have equal work. It is the split that Transformer Engine's attention and Megatron's rotary
embeddings expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def zigzag(lengths: Sequence[int], cp: int, rank: int) -> Tensor:
    """Positions in the whole row that one rank holds, in the order in which it holds them.

    Args:
        lengths: tokens of each sequence of the row, each a multiple of 2 x `cp` if that is over 1.
        cp: context-parallel ranks.
        rank: 0 .. cp - 1.

    Returns:
        [S / cp] int64.
    """
    if cp == 1:
        return torch.arange(sum(lengths))
    assert all(n % (2 * cp) == 0 for n in lengths), (list(lengths), cp)
    starts = [0, *accumulate(lengths)][:-1]
    pieces = []
    for start, length in zip(starts, lengths, strict=True):
        chunk = length // (2 * cp)
        for number in (rank, 2 * cp - 1 - rank):
            pieces.append(torch.arange(chunk) + start + number * chunk)
    return torch.cat(pieces)


class _GatherRows(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.count = group, len(rows)
        gathered = rows.new_empty((group.size() * len(rows), *rows.shape[1:]))
        dist.all_gather_into_tensor(gathered, rows.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        mine = grad.new_empty((ctx.count, *grad.shape[1:]))
        dist.reduce_scatter_tensor(mine, grad.contiguous(), group=ctx.group)
        return mine, None


def gather_rows(rows: Tensor, group: Any) -> Tensor:
    """Rows of all ranks of the group, in the order of ranks; differentiable.

    The backward pass sums each row's gradient over the ranks. Collective over the group in both
    passes; every rank has equally many rows.
    """
    gathered: Tensor = _GatherRows.apply(rows, group)
    return gathered


class _JoinSums(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def join_over_context(value: Tensor) -> Tensor:
    """As `sum_over_context`, differentiable, for a loss of results that lie on several ranks.

    Every rank then computes the same loss, and its backward pass gives each rank the gradient of
    its own part, once: gradients are summed over the context-parallel ranks as always, but the loss
    itself counts on one of them only. Collective over that group in the forward pass.
    """
    group = context_group()
    if group.size() == 1:
        return value
    joined: Tensor = _JoinSums.apply(value, group)
    return joined


def context_group() -> Any:
    """The ranks that hold parts of the same sequences, as Megatron's collectives use them."""
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()


def sum_over_context(value: Tensor) -> Tensor:
    """Sum over the context-parallel ranks, in place. Collective over that group.

    Results of single tokens are zero on ranks that do not hold them, so this puts them together,
    exactly.
    """
    group = context_group()
    if group.size() > 1:
        dist.all_reduce(value, group=group)
    return value
