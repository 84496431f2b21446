import json
from collections import Counter

import numpy as np
import pytest

from megappo.data.curriculum import CurriculumSampler, Preference
from megappo.data.sampler import PromptSampler
from megappo.errors import CheckpointError, DataError

WANTED = Preference(target=0.5, width=0.5, floor=0.1, smoothing=0.25)


def sampler(num_rows=10, **changes):
    settings = {"batch_size": 4, "seed": 7, "shuffle": True, "preference": WANTED, **changes}
    return CurriculumSampler(num_rows, **settings)


def score_of(row):
    return row / 9


def run(made, num_batches):
    """Batches, each scored before the next is drawn."""
    batches = []
    for _ in range(num_batches):
        batches.append(made.next_batch())
        made.observe(batches[-1][1], [score_of(row) for row in batches[-1][1]])
    return batches


def test_chances_of_a_hand_computed_case():
    scores = np.array([0.5, 0.75, 0.125, 0.0, 1.0, 3.0], dtype=np.float32)
    assert WANTED.weights(scores).tolist() == [1.0, 0.5, 0.25, 0.1, 0.1, 0.1]


def test_rows_without_a_score_come_first():
    made = sampler()
    rows = [row for _, batch in run(made, 3) for row in batch]
    assert sorted(rows[:10]) == list(range(10))
    assert rows[:10] != sorted(rows[:10])
    assert len(set(rows[8:])) == 4
    in_order = [batch for _, batch in run(sampler(shuffle=False), 3)]
    assert in_order[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert in_order[2][:2] == [8, 9]


def test_a_rows_score_is_a_running_mean_that_begins_with_its_first():
    made = sampler()
    for score in (1.0, 0.0, 0.0):
        made.observe([3], [score])
    assert made.metrics() == {
        "sampling/unseen_rows": 9.0,
        "sampling/curriculum_mean_score": 0.75 * 0.75,
    }
    made.observe([3, 4], [float("nan"), float("inf")])
    assert made.metrics()["sampling/curriculum_mean_score"] == 0.75 * 0.75
    assert made.metrics()["sampling/unseen_rows"] == 9
    assert sampler().metrics() == {"sampling/unseen_rows": 10.0}


def test_rows_are_drawn_as_often_as_their_chances_say():
    """Batches of one are independent draws, so counts are binomial; five standard deviations."""
    scores = [0.5, 0.75, 0.125, 0.0]
    made, draws = sampler(4, batch_size=1), 4000
    made.observe(range(4), scores)
    counts = Counter(made.next_batch()[1][0] for _ in range(draws))
    for row, weight in enumerate((1.0, 0.5, 0.25, 0.1)):
        share = weight / 1.85
        assert counts[row] / draws == pytest.approx(
            share, abs=5 * (share * (1 - share) / draws) ** 0.5
        )


def test_a_batch_is_a_weighted_draw_without_replacement():
    """Two of three: the chance that a row is left out, by enumeration of the draws in order."""
    made, draws = sampler(3, batch_size=2), 4000
    made.observe(range(3), [0.5, 0.75, 0.125])
    w = (1.0, 0.5, 0.25)
    left_out = Counter(3 - sum(made.next_batch()[1]) for _ in range(draws))
    for row in range(3):
        i, j = (other for other in range(3) if other != row)
        total = sum(w)
        p = w[i] / total * w[j] / (total - w[i]) + w[j] / total * w[i] / (total - w[j])
        assert left_out[row] / draws == pytest.approx(p, abs=5 * (p * (1 - p) / draws) ** 0.5)


def test_the_order_follows_from_seed_and_scores():
    assert run(sampler(), 9) == run(sampler(), 9) != run(sampler(seed=8), 9)
    other = sampler()
    other.observe([0], [0.5])
    assert run(sampler(), 9) != run(other, 9)


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 7])
def test_a_resumed_sampler_continues_as_an_undisturbed_one(stop):
    undisturbed, first, second = sampler(), sampler(), sampler()
    expected = run(undisturbed, 12)
    got = run(first, stop)
    state = json.loads(json.dumps(first.state_dict()))
    run(first, 2)
    run(second, 1)
    second.load_state_dict(state)
    assert second.is_at_end == (stop > 0 and stop % 2 == 0)
    got += run(second, 12 - stop)
    assert got == expected
    assert second.state_dict() == undisturbed.state_dict()
    assert second.metrics() == undisturbed.metrics()


def test_rows_without_a_score_take_no_room_in_the_state():
    made = sampler(1_000_000)
    run(made, 2)
    assert len(json.dumps(made.state_dict())) < 50_000


def test_epochs_are_as_long_as_the_rows():
    assert [epoch for epoch, _ in run(sampler(), 5)] == [0, 0, 1, 1, 2]


def test_states_of_other_rows_or_another_order_are_refused():
    state = sampler().state_dict()
    with pytest.raises(CheckpointError, match="num_rows 10 -> 11"):
        sampler(11).load_state_dict(state)
    plain = PromptSampler(10, batch_size=4, seed=7, shuffle=True)
    with pytest.raises(CheckpointError, match=r"plain order, and are drawn by data.curriculum"):
        sampler().load_state_dict(plain.state_dict())
    with pytest.raises(CheckpointError, match="0 batches and 11 scores for 10 rows"):
        sampler().load_state_dict({**state, "scores": sampler(11).state_dict()["scores"]})
    for damaged in ("&", "abcd", state["scores"][:-8], None):
        with pytest.raises(CheckpointError, match="cannot be read"):
            sampler().load_state_dict({**state, "scores": damaged})
    with pytest.raises(DataError, match="3 < 4"):
        sampler(3)


def test_another_preference_may_go_on_from_a_state():
    first = sampler()
    run(first, 4)
    second = sampler(preference=Preference(target=1.0, width=0.1, floor=0.01, smoothing=1.0))
    second.load_state_dict(first.state_dict())
    assert second.metrics() == first.metrics()
