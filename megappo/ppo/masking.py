"""Sums, means and moments over the trained tokens of a batch.

Legend: B samples, T response tokens; a mask is bool and True where a token counts.

Masked slots are *selected away*, never multiplied by zero, because 0 * NaN is NaN. A NaN on a
counted token is not hidden: it reaches the result. There is no division over ranks here: a caller
who needs a global figure reduces sums and counts and divides once.
"""

from __future__ import annotations

import torch
from torch import Tensor


def zero_outside(x: Tensor, mask: Tensor) -> Tensor:
    """`x` as float32 where `mask` is True, 0 elsewhere.

    Apply it to the *inputs* of a formula, not only to its result: a NaN gradient that a formula
    makes in a masked slot then ends at this selection instead of reaching the model.

    Args:
        x: any shape, any real dtype.
        mask: bool, the shape of `x`.
    """
    assert mask.dtype is torch.bool, f"a mask is bool, got {mask.dtype}"
    assert x.shape == mask.shape, f"x {tuple(x.shape)} and mask {tuple(mask.shape)} differ"
    selected = x.float()
    return torch.where(mask, selected, torch.zeros_like(selected))


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of `x` over the mask: 0-dim float32.

    The result stays attached to the graph of `x` even where the mask is empty, so that a backward
    pass gives zeros, not None, and every rank takes part in the gradient reduction.
    """
    return zero_outside(x, mask).sum()


def masked_count(mask: Tensor) -> Tensor:
    """Number of True slots: 0-dim float32, exact up to 2^24 tokens."""
    return mask.sum().float()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of `x` over the mask: 0-dim float32, and 0 (attached to the graph) for an empty mask.

    A mean over this tensor alone. For a loss, sum with `masked_sum` and divide by the count of the
    whole mini-batch instead: a mean of micro-batch means depends on how the batch was split.
    """
    return masked_sum(x, mask) / masked_count(mask).clamp(min=1.0)


def local_sum_count(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """First pass of global moments: this rank's sum and count, both 0-dim float64.

    Float64, so that the moments do not depend on how the tokens are spread over the ranks beyond
    what a float32 result can show, and so that squares of large float32 values do not overflow.
    """
    return zero_outside(x, mask).double().sum(), mask.sum().double()


def local_sq_dev(x: Tensor, mask: Tensor, mean: Tensor | float) -> Tensor:
    """Second pass: this rank's sum of squared deviations from the *global* mean, 0-dim float64.

    Two passes instead of a sum of squares: E[x^2] - E[x]^2 cancels when the mean is large
    against the spread.
    """
    deviation = x.double() - mean
    return torch.where(mask, deviation.square(), torch.zeros_like(deviation)).sum()


def masked_moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population variance over the mask of this tensor alone, 0-dim float64.

    An empty mask gives (0, 0).
    """
    total, count = local_sum_count(x, mask)
    count = count.clamp(min=1.0)
    mean = total / count
    return mean, local_sq_dev(x, mask, mean) / count
