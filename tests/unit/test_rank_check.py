"""A fingerprint of weights sees any one bit, and what a difference between ranks is called."""

import pytest
import torch

from megappo.distributed.rank_check import _describe, _first_difference, fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("numel", [1, 255, 256, 1000])
def test_any_one_bit_changes_it(dtype, numel):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(0, 100, (numel,), generator=generator).to(dtype)
    before = fingerprint(weights)
    for place in {0, numel // 2, numel - 1}:
        for bit in (1, 64):
            other = weights.clone()
            other.view(torch.uint8)[place * weights.element_size()] ^= bit
            assert fingerprint(other) != before, (place, bit)


def test_equal_changes_of_two_rows_do_not_cancel():
    weights = torch.zeros(1024, dtype=torch.int32).view(torch.float32)
    other = weights.clone()
    other.view(torch.int32)[5] += 1
    other.view(torch.int32)[700] -= 1
    assert fingerprint(other) != fingerprint(weights)


def test_it_is_of_the_values_and_not_of_their_layout_in_memory():
    weights = torch.arange(600.0).view(20, 30)
    assert fingerprint(weights.t().contiguous().t()) == fingerprint(weights)


def test_by_hand():
    weights = torch.zeros(2 * 256 + 1, dtype=torch.int32)
    weights[3], weights[256], weights[512] = 10, 100, 1000
    assert fingerprint(weights) == 3 * 10 + 5 * 100 + 1000


def test_a_difference_is_found_whichever_ranks_have_it():
    a, b = ("between data-parallel ranks", (0,)), ("between data-parallel ranks", (1,))
    assert _first_difference([{a: "x"}, {a: "x"}, {b: "y"}, {b: "y"}]) is None
    assert _first_difference([{a: "x"}, {a: "x"}, {b: "y"}, {b: "z"}]) == b


def test_a_difference_is_described_by_tensor_and_ranks():
    told = [{"norm": 1, "bias": 2}, {}, {"norm": 1, "bias": 3}, {"norm": 1, "bias": 2}]
    assert _describe(told) == "bias, ranks 0, 3 against 2 (1 of 2 tensors differ)"
