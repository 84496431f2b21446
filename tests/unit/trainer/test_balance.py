"""Plans of who gets which sample, from lengths alone; the move itself is tested on real ranks."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.trainer.balance import cost_ratio, plan_batch, plan_metrics


def square(n):
    return float(n * n)


def test_a_hand_computed_plan_keeps_long_samples_at_home():
    # One mini-batch of 2 samples on 2 ranks: 9 | 8 and 2 | 1 are level as (9, 1) and (8, 2). Sample
    # 0 = 9 and sample 1 = 8 are on rank 0, which keeps the longer one.
    plan = plan_batch([[9, 8], [2, 1]], samples_per_mini_batch=2, cost=float)
    assert plan == [[[0, 3], [1, 2]]]
    metrics = plan_metrics(plan, [[9, 8], [2, 1]], samples_per_mini_batch=2, cost=float)
    assert metrics == {
        "balance/cost_ratio_before": 17 / 10,
        "balance/cost_ratio_after": 1.0,
        "balance/moved_share": 0.5,
    }


def test_parts_go_to_the_rank_that_holds_most_of_their_tokens():
    # Level are samples 0 and 2 (1 + 9 tokens), and 1 and 3 (8 + 2). Rank 1 has sample 2 already,
    # and rank 0 sample 1.
    plan = plan_batch([[1, 8], [9, 2]], samples_per_mini_batch=2, cost=float)
    assert plan == [[[1, 3], [0, 2]]]


def test_mini_batches_are_planned_apart():
    # Over the whole batch rank 0 and rank 1 are level; within each mini-batch they are not.
    totals = [[9, 8, 2, 1], [2, 1, 9, 8]]
    plan = plan_batch(totals, samples_per_mini_batch=2, cost=float)
    assert plan == [[[0, 3], [1, 2]], [[0, 3], [1, 2]]]


def test_the_cost_decides_and_not_the_length():
    # By length 10 + 2 = 6 + 6; by square 104 and 72, and no equal counts are more level.
    assert plan_batch([[10, 6], [6, 2]], samples_per_mini_batch=2, cost=float) == [[[0, 3], [1, 2]]]
    plan = plan_batch([[10, 6], [6, 2]], samples_per_mini_batch=2, cost=square)
    assert cost_ratio(plan[0], [10, 6, 6, 2], square) == pytest.approx(104 / 88)


def test_a_mini_batch_that_cannot_become_more_level_stays_as_it_is():
    assert plan_batch([[5, 5], [5, 5]], samples_per_mini_batch=2, cost=square) == [[[0, 1], [2, 3]]]
    assert plan_batch([[7, 1], [6, 2]], samples_per_mini_batch=2, cost=float) == [[[0, 1], [2, 3]]]


@given(data=st.data(), ranks=st.integers(1, 5), size=st.integers(1, 5), minis=st.integers(1, 3))
def test_every_plan_deals_each_sample_once_and_never_makes_it_worse(data, ranks, size, minis):
    lengths = st.lists(st.integers(1, 500), min_size=size * minis, max_size=size * minis)
    totals = data.draw(st.lists(lengths, min_size=ranks, max_size=ranks))
    plan = plan_batch(totals, samples_per_mini_batch=size, cost=square)
    assert len(plan) == minis
    for parts in plan:
        assert [len(part) for part in parts] == [size] * ranks
        assert sorted(itertools.chain(*parts)) == list(range(ranks * size))
        assert all(part == sorted(part) for part in parts)
    metrics = plan_metrics(plan, totals, samples_per_mini_batch=size, cost=square)
    assert metrics["balance/cost_ratio_after"] >= 1 - 1e-12
    assert metrics["balance/cost_ratio_after"] <= metrics["balance/cost_ratio_before"]
    assert plan == plan_batch(totals, samples_per_mini_batch=size, cost=square)
