"""What a rank hands to collectives outside gradients and parameters does not grow with ranks."""

import json

import pytest

from tests.distributed.launch import run_ranks


def test_control_bytes_and_calls_of_a_rank_are_flat_from_2_to_4_ranks(tmp_path):
    (text,) = run_ranks("control_traffic.py", 1, str(tmp_path), timeout_s=300)
    two, four = (
        json.loads(line.removeprefix("FIGURES "))
        for line in text.splitlines()
        if line.startswith("FIGURES ")
    )
    assert (two["ranks"], four["ranks"]) == (2, 4)
    assert two["control/calls"] == four["control/calls"] > 0
    assert four["control/given"] == pytest.approx(two["control/given"], rel=0.05)
    # All gradients are handed in once, and 1 / DP of the parameters.
    assert four["buckets/given"] / two["buckets/given"] == pytest.approx((1 + 1 / 4) / (1 + 1 / 2))
