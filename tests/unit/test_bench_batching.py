"""The bounds that the packing benchmark shows, and that it counts what it says."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tools.bench import batching
from tools.bench.batching import CASES, DISTRIBUTIONS, Case, measure, pack_mini_batch

SMALL = Case(lengths="made up", dp=2, tp=4, cp=1, samples=8, budget=10)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_at_most_2_percent_of_positions_are_wasted_and_ranks_are_level_to_5_percent(case):
    result = measure(case, DISTRIBUTIONS[case.lengths])
    assert result.waste <= 0.02
    assert result.cost_ratio_after <= 1.05
    assert result.cost_ratio_floor <= result.cost_ratio_after <= result.cost_ratio_before
    assert result.micro_batches <= result.least_micro_batches + 0.5


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_bounds_do_not_hang_on_one_seed(seed):
    """The tightest case of either kind: many ranks with few samples, and CP 4."""
    for case in CASES:
        if (case.dp, case.cp) == (64, 4):
            result = measure(case, DISTRIBUTIONS[case.lengths], seed=seed)
            assert result.waste <= 0.02
            assert result.cost_ratio_after <= 1.05


def test_waste_of_a_hand_computed_case():
    """Two samples of 5 fill a budget of 10, and TP 4 makes each row 12 long."""
    result = measure(SMALL, lambda random, num_prompts: [5] * 8 * num_prompts)
    assert result.waste == pytest.approx(2 / 12)
    assert result.fill == 1.0
    assert result.micro_batches == result.least_micro_batches == 4
    assert result.cost_ratio_before == result.cost_ratio_after == result.cost_ratio_floor == 1
    assert result.moved_share == 0


def test_empty_micro_batches_and_padded_sequences_count_as_waste():
    # CP 2 pads 5 to 8: rank 0 needs 3 forwards of one sample, rank 1 has one and two dummies of
    # lcm(4, 2 * 4) = 8 positions.
    packing = pack_mini_batch([[5, 5, 5], [5]], replace(SMALL, cp=2))
    assert packing.micro_batches == 3
    assert packing.real_tokens == 20
    assert packing.positions == 6 * 8


def test_lengths_have_the_means_that_the_benchmark_states():
    random = np.random.default_rng(0)
    gsm8k = DISTRIBUTIONS["gsm8k-like"](random, 4000)
    assert np.mean(gsm8k) == pytest.approx(239, rel=0.02)
    heavy = DISTRIBUTIONS["heavy-tailed"](random, 4000)
    assert np.mean(np.array(heavy) > 16384) == pytest.approx(0.014, abs=0.003)
    assert max(heavy) <= 16384 + 1024 + batching.TEMPLATE_TOKENS


def test_the_command_prints_json_with_every_field(capsys, monkeypatch):
    monkeypatch.setattr(batching, "CASES", CASES[:1])
    assert batching.main(["--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["lengths"] == "gsm8k-like"
    assert row["waste"] == 0
    assert row["balance_ms"] > 0
    assert batching.main(["--gsm8k", "nowhere"]) == 2
    assert "nowhere is none" in capsys.readouterr().err
