import json
from collections import Counter
from fractions import Fraction

import pytest

from megappo.data.sampler import PromptSampler
from megappo.data.source_shares import SourceSampler
from megappo.errors import CheckpointError, DataError, UserError

SOURCES = ["a", "b", "b", "c", "a", "b", "c", "b", "a", "b", "b", "c", "b", "b"]  # 3, 8, 3


def sampler(sources=SOURCES, weights=None, **changes):
    settings = {"batch_size": 3, "seed": 7, "shuffle": True, **changes}
    return SourceSampler(sources, weights={"a": 2} if weights is None else weights, **settings)


def draws(made, num_batches):
    return [row for _ in range(num_batches) for row in made.next_batch()[1]]


@pytest.mark.parametrize(
    "weights",
    [
        {},
        {"a": 2},
        {"a": 0.1, "b": 0.2, "c": 0.7},
        {"a": 0.05, "c": 3},
        {"b": 1e-3, "a": 1.75, "c": 1.9},
        {"a": 5, "b": 5, "c": 4.9999},
        {"c": 0},
    ],
)
@pytest.mark.parametrize("batch_size", [1, 7])
def test_after_any_number_of_draws_each_source_is_within_one_of_its_share(weights, batch_size):
    sources = [name for name in "abc" for _ in range(20)]
    full = {name: Fraction(str(weights.get(name, 1))) for name in "abc"}
    total, counts = sum(full.values()), Counter()
    made = sampler(sources, weights, batch_size=batch_size)
    for number, row in enumerate(draws(made, 700 // batch_size), start=1):
        counts[sources[row]] += 1
        for name, weight in full.items():
            assert abs(counts[name] - number * weight / total) < 1, (number, counts)


def test_a_hand_computed_order_without_shuffling():
    """Weights 2 and 1: a b a, again and again, each source from the top when it is used up."""
    made = sampler(["a"] * 4 + ["b"] * 3, {"a": 2}, shuffle=False)
    assert [made.next_batch() for _ in range(5)] == [
        (0, [0, 4, 1]),
        (0, [2, 5, 3]),
        (1, [0, 6, 1]),
        (1, [2, 4, 3]),
        (2, [0, 5, 1]),
    ]


def test_epochs_are_as_long_as_the_rows_that_can_be_drawn():
    made = sampler(weights={"b": 0, "c": 2}, batch_size=3)  # 6 rows
    assert made.num_rows == 6
    assert made.batches_per_epoch == 2
    assert not made.is_at_end
    ends = []
    for expected in (0, 0, 1, 1, 2):
        assert made.next_batch()[0] == made.epoch == expected
        ends.append(made.is_at_end)
    assert ends == [False, True, False, True, False]


def test_no_batch_has_a_row_twice_and_each_pass_over_a_source_is_its_own():
    sources = [name for name in "abc" for _ in range(7)]
    made = sampler(sources, {"a": 3.3, "b": 0.7}, batch_size=5)
    batches = [made.next_batch()[1] for _ in range(300)]
    assert all(len(set(batch)) == 5 for batch in batches)
    of_a = [row for batch in batches for row in batch if sources[row] == "a"]
    assert set(of_a) == set(range(7))
    assert len({tuple(of_a[i : i + 5]) for i in range(0, 100, 5)}) > 10, "the same order again"


def test_the_order_follows_from_the_seed():
    one, again, other = (draws(sampler(seed=seed), 8) for seed in (7, 7, 8))
    assert one == again != other
    assert Counter(SOURCES[row] for row in one) == Counter(SOURCES[row] for row in other)


@pytest.mark.parametrize("stop", range(0, 14, 3))
def test_a_resumed_sampler_continues_as_an_undisturbed_one(stop):
    undisturbed, first, second = sampler(), sampler(), sampler()
    expected = [undisturbed.next_batch() for _ in range(20)]
    got = [first.next_batch() for _ in range(stop)]
    state = json.loads(json.dumps(first.state_dict()))
    first.next_batch()
    assert json.loads(json.dumps(first.state_dict())) != state
    second.next_batch()
    second.load_state_dict(state)
    assert second.is_at_end == (stop > 0 and stop % second.batches_per_epoch == 0)
    got += [second.next_batch() for _ in range(20 - stop)]
    assert got == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"weights": {"a": 3}}, r"source_weights \{'a': 2.0, .*\} -> \{'a': 3.0"),
        ({"seed": 8}, "seed 7 -> 8"),
        ({"sources": [*SOURCES, "a"]}, "num_rows 14 -> 15"),
    ],
)
def test_a_state_of_other_shares_is_refused_by_name(changes, named):
    with pytest.raises(CheckpointError, match=named):
        sampler(**changes).load_state_dict(sampler().state_dict())


def test_a_weight_of_one_is_the_same_as_none():
    sampler(weights={"a": 2, "b": 1.0}).load_state_dict(sampler().state_dict())


def test_states_of_another_kind_of_order_are_refused():
    plain = PromptSampler(14, batch_size=3, seed=7, shuffle=True)
    with pytest.raises(CheckpointError, match=r"plain order, and are drawn by data.source_weights"):
        sampler().load_state_dict(plain.state_dict())
    with pytest.raises(CheckpointError, match=r"by data.source_weights, and are drawn in a plain"):
        plain.load_state_dict(sampler().state_dict())


@pytest.mark.parametrize(
    "change",
    [{"drawn": [1, 1]}, {"drawn": [3, 0, -1]}, {"positions": [4, 0, 0]}, {"num_batches": 1}],
)
def test_an_impossible_state_is_refused(change):
    with pytest.raises(CheckpointError, match="cannot be; choose another"):
        sampler().load_state_dict({**sampler().state_dict(), **change})
    with pytest.raises(CheckpointError, match="lacks passes"):
        sampler().load_state_dict(
            {k: v for k, v in sampler().state_dict().items() if k != "passes"}
        )


def test_unknown_sources_and_weights_of_nothing_are_refused():
    with pytest.raises(UserError, match=r"names 'd', which no row .* known: a, b, c"):
        sampler(weights={"d": 1})
    with pytest.raises(UserError, match=r"leaves out every data_source \(a, b, c\)"):
        sampler(weights={"a": 0, "b": 0.0, "c": 0})


def test_a_source_with_too_few_rows_for_its_share_of_a_step_is_refused_with_the_numbers():
    message = "data_source a has 3 usable rows, .* gives it 4 of a step's 6 prompts, so up to 4"
    with pytest.raises(DataError, match=message):
        sampler(weights={"a": 4}, batch_size=6)
    sampler(weights={"a": 2, "c": 1}, batch_size=6)  # 3 of 3 rows in every step
    with pytest.raises(DataError, match="9 < 15: 11 rows read, 2 dropped"):
        sampler(["a"] * 9, {"a": 1}, batch_size=15, num_dropped=2)
