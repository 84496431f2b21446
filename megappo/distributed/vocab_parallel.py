"""Log-probabilities and entropies from logits whose vocabulary is split over the TP ranks.

Legend: N tokens, V vocabulary, W = padded V / TP columns on this rank; nats throughout. With
x = logits / temperature and Z = sum over V of exp(x):

    log p(y) = x_y - log Z            d log p(y) / d x_i = [i = y] - p_i
    H = log Z - sum_i p_i x_i         d H / d x_i = -p_i (log p_i + H)

Logits can be the largest tensor of a step, so no second copy of them is held: float32 values exist
for `chunk_tokens` tokens at a time, the backward pass computes the softmax again, and the gradient
is written over the logits. Columns at or beyond `vocab_size` pad the vocabulary: they take no part
in any sum and get no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 2**23
"""Elements of a float32 temporary, 32 MiB: enough to fill a device, little beside the logits."""

# Stands for minus infinity where it would be multiplied by a probability of 0, which gives NaN.
_LOWEST = -1e30


def log_probs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    tp_group: dist.ProcessGroup | None,
    vocab_size: int,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target and, if wanted, entropy of each distribution; differentiable.

    Collective over the TP group in the forward pass: two all-reduces whatever `chunk_tokens` is.
    The backward pass overwrites `logits` unless they are a leaf of the graph or a view of one; any
    other use of them in the same backward pass then fails with PyTorch's in-place error.

    Args:
        logits: [..., W] this rank's columns, of any floating dtype.
        targets: [...] int64 token ids over the whole vocabulary. An id outside it gives NaN.
        tp_group: The ranks that share the vocabulary, in the order of their columns; None for one.
        vocab_size: V without padding.
        temperature: Logits are divided by it; positive.
        chunk_tokens: Tokens that are in float32 at a time; None for as many as make each of the
            float32 temporaries, of which there are up to three, `CHUNK_ELEMENTS` large.
        with_entropy: Compute the entropy too, which costs a product more for each logit.

    Returns:
        Log-probabilities [...] float32, and entropies [...] float32 or None.
    """
    assert temperature > 0, f"temperature must be positive, not {temperature}"
    assert logits.shape[:-1] == targets.shape, (logits.shape, targets.shape)
    flat = logits.flatten(0, -2)
    if chunk_tokens is None:
        chunk_tokens = max(1, CHUNK_ELEMENTS // flat.shape[-1])
    owner = logits if logits._base is None else logits._base
    shard = _Shard(flat.shape[-1], vocab_size, tp_group)
    log_probs, entropy = _VocabParallel.apply(
        flat, targets.flatten(), shard, temperature, chunk_tokens, with_entropy, owner.is_leaf
    )
    if not with_entropy:
        return log_probs.view(targets.shape), None
    return log_probs.view(targets.shape), entropy.view(targets.shape)


class _Shard:
    """The columns of this rank, and sums over all of them."""

    def __init__(self, width: int, vocab_size: int, group: dist.ProcessGroup | None) -> None:
        self.group = group if group is not None and group.size() > 1 else None
        self.first = width * group.rank() if group is not None else 0
        self.real = min(max(vocab_size - self.first, 0), width)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        if self.group is not None:
            dist.all_reduce(tensor, op=op, group=self.group)

    def locate(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each target on this rank, and whether it has one; 0 where it has none."""
        column = targets - self.first
        inside = (column >= 0) & (column < self.real)
        return column.where(inside, 0), inside


def _chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


class _VocabParallel(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        shard: _Shard,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
        is_leaf: bool,
    ) -> tuple[Tensor, Tensor]:
        peak = _row_maxima(logits, shard, temperature, chunk_tokens)
        shard.all_reduce(peak, dist.ReduceOp.MAX)
        sums = _row_sums(logits, targets, peak, shard, temperature, chunk_tokens, with_entropy)
        shard.all_reduce(sums, dist.ReduceOp.SUM)
        total, at_target, weighted, owners = sums
        log_total = total.log()
        log_probs = torch.where(owners == 1, at_target - log_total, torch.nan)
        entropy = log_total - weighted / total
        ctx.save_for_backward(logits, targets, peak + log_total, entropy)
        ctx.set_materialize_grads(False)
        ctx.settings = shard, temperature, chunk_tokens, is_leaf
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits, targets, log_z, entropy = ctx.saved_tensors
        shard, temperature, chunk_tokens, is_leaf = ctx.settings
        grad = torch.empty_like(logits) if is_leaf else logits.detach()
        for rows in _chunks(len(logits), chunk_tokens):
            grad[rows, : shard.real] = _row_gradients(
                logits[rows, : shard.real].float() / temperature - log_z[rows, None],
                shard.locate(targets[rows]),
                entropy[rows],
                None if grad_log_probs is None else grad_log_probs[rows] / temperature,
                None if grad_entropy is None else grad_entropy[rows] / temperature,
            )
            grad[rows, shard.real :] = 0
        return grad, None, None, None, None, None, None


def _row_maxima(logits: Tensor, shard: _Shard, temperature: float, chunk_tokens: int) -> Tensor:
    """Largest x of each token on this rank, [N] float32; minus infinity if all are padding."""
    peak = torch.full((len(logits),), -torch.inf, device=logits.device)
    if shard.real:
        for rows in _chunks(len(logits), chunk_tokens):
            peak[rows] = logits[rows, : shard.real].amax(-1).float() / temperature
    return peak


def _row_sums(
    logits: Tensor,
    targets: Tensor,
    peak: Tensor,
    shard: _Shard,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool,
) -> Tensor:
    """This rank's part of four sums a token, [4, N] float32, with z = x - peak.

    They are sum exp(z), z of the target, sum exp(z) z (0 unless `with_entropy`), and how many
    ranks hold the target.
    """
    sums = torch.zeros(4, len(logits), device=logits.device)
    if not shard.real:
        return sums
    for rows in _chunks(len(logits), chunk_tokens):
        z = logits[rows, : shard.real].float() / temperature - peak[rows, None]
        column, inside = shard.locate(targets[rows])
        sums[1, rows] = z.gather(-1, column[:, None])[:, 0].where(inside, 0.0)
        sums[3, rows] = inside.float()
        exp_z = z.exp()
        sums[0, rows] = exp_z.sum(-1)
        if with_entropy:
            sums[2, rows] = exp_z.mul_(z.clamp_(min=_LOWEST)).sum(-1)
    return sums


def _row_gradients(
    log_p: Tensor,
    target: tuple[Tensor, Tensor],
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Gradient of some tokens' logits, [n, real columns] float32; overwrites `log_p`."""
    p = log_p.exp()
    weight = log_p.new_zeros(len(log_p), 1)
    if grad_log_probs is not None:
        weight = weight - grad_log_probs[:, None]
    if grad_entropy is None:
        grad = p.mul_(weight)
    else:
        surprise = log_p.clamp_(min=_LOWEST).add_(entropy[:, None])
        grad = p.mul_(weight - surprise.mul_(grad_entropy[:, None]))
    if grad_log_probs is not None and grad.shape[-1]:
        column, inside = target
        grad.scatter_add_(-1, column[:, None], grad_log_probs.where(inside, 0.0)[:, None])
    return grad
