import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.ppo.masking import (
    local_sq_dev,
    local_sum_count,
    masked_count,
    masked_mean,
    masked_moments,
    masked_sum,
    zero_outside,
)


def test_masked_sum_and_mean_skip_a_nan_outside_the_mask() -> None:
    x = torch.tensor([[1.0, math.nan, 3.0]])
    mask = torch.tensor([[True, False, True]])
    assert masked_sum(x, mask).item() == 4.0
    assert masked_mean(x, mask).item() == 2.0
    assert masked_count(mask).item() == 2.0


def test_masked_mean_masks_the_numerator_too() -> None:
    x = torch.tensor([[2.0, 9.0], [4.0, -7.0]])
    mask = torch.tensor([[True, False], [True, False]])
    assert masked_mean(x, mask).item() == 3.0


@pytest.mark.parametrize("reduce", [masked_sum, masked_mean])
def test_an_empty_mask_gives_zero_with_a_zero_gradient(reduce) -> None:
    x = torch.tensor([[1.0, math.nan, math.inf]], requires_grad=True)
    result = reduce(x, torch.zeros(1, 3, dtype=torch.bool))
    result.backward()
    assert result.item() == 0.0
    assert torch.equal(x.grad, torch.zeros(1, 3))


def test_zero_outside_ends_a_nan_gradient_of_a_masked_slot() -> None:
    x = torch.tensor([0.0, 4.0], requires_grad=True)
    inside = torch.tensor([False, True])
    # d sqrt(0) is inf; selecting after the root would multiply it by 0 and give NaN.
    (zero_outside(x, inside) + (~inside).float()).sqrt().sum().backward()
    assert torch.equal(x.grad, torch.tensor([0.0, 0.25]))


def test_a_nan_inside_the_mask_stays_visible() -> None:
    x = torch.tensor([[1.0, math.nan]])
    assert math.isnan(masked_mean(x, torch.ones(1, 2, dtype=torch.bool)).item())


def test_sums_are_float32_for_half_precision_inputs() -> None:
    # 4096 ones: bf16 stops counting at 256.
    x = torch.ones(1, 4096, dtype=torch.bfloat16)
    total = masked_sum(x, torch.ones(1, 4096, dtype=torch.bool))
    assert total.dtype is torch.float32
    assert total.item() == 4096.0


def test_a_mask_that_is_not_bool_is_refused() -> None:
    with pytest.raises(AssertionError, match="mask is bool"):
        masked_sum(torch.ones(2), torch.ones(2))


def test_moments_of_four_tokens() -> None:
    x = torch.tensor([[1.0, 2.0, 99.0], [3.0, 4.0, math.nan]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    mean, variance = masked_moments(x, mask)
    assert mean.item() == 2.5
    assert variance.item() == 1.25


def test_moments_of_an_empty_mask_are_zero() -> None:
    mean, variance = masked_moments(torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool))
    assert (mean.item(), variance.item()) == (0.0, 0.0)


def test_moments_survive_squares_past_float32() -> None:
    x = torch.tensor([[1e30, -1e30]])
    _, variance = masked_moments(x, torch.ones(1, 2, dtype=torch.bool))
    assert variance.item() == pytest.approx(1e60, rel=1e-6)


def test_moments_keep_a_small_spread_around_a_large_mean() -> None:
    # Population variance of 10000 +- 1 is 1; E[x^2] - E[x]^2 in float32 gives 0 or 8.
    x = torch.tensor([[9999.0, 10001.0]])
    _, variance = masked_moments(x, torch.ones(1, 2, dtype=torch.bool))
    assert variance.item() == 1.0


FLOATS = st.floats(-1e3, 1e3, width=32)


@settings(deadline=None)
@given(st.lists(st.tuples(FLOATS, st.booleans()), min_size=1, max_size=30), st.integers(1, 5))
def test_global_moments_do_not_depend_on_the_split_into_ranks(slots, num_ranks) -> None:
    parts = [slots[r::num_ranks] for r in range(num_ranks)]
    tensors = [
        (torch.tensor([v for v, _ in p]), torch.tensor([m for _, m in p], dtype=torch.bool))
        for p in parts
    ]
    pairs = [local_sum_count(x, m) for x, m in tensors]
    count = sum(c for _, c in pairs)
    kept = [v for v, m in slots if m]
    assert count.item() == len(kept)
    if kept:
        mean = sum(s for s, _ in pairs) / count
        variance = sum(local_sq_dev(x, m, mean) for x, m in tensors) / count
        assert mean.item() == pytest.approx(statistics.fmean(kept), rel=1e-12, abs=1e-11)
        assert variance.item() == pytest.approx(statistics.pvariance(kept), rel=1e-9, abs=1e-9)
