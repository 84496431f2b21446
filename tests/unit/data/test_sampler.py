import json

import numpy as np
import pytest

from megappo.data.sampler import PromptSampler, num_ended, rank_share
from megappo.errors import CheckpointError, DataError, UserError


def sampler(num_rows=10, **changes):
    return PromptSampler(num_rows, **{"batch_size": 3, "seed": 7, "shuffle": True, **changes})


def test_batches_of_an_unshuffled_epoch_in_file_order():
    s = sampler(8, shuffle=False)
    got = [s.next_batch() for _ in range(3)]
    assert got == [(0, [0, 1, 2]), (0, [3, 4, 5]), (1, [0, 1, 2])], (
        "rows 6 and 7 do not fill a batch"
    )
    assert s.batches_per_epoch == 2


def test_the_order_of_an_epoch_follows_from_seed_and_epoch_alone():
    s = sampler()
    batches = [s.next_batch() for _ in range(6)]
    for epoch in (0, 1):
        drawn = [p for e, batch in batches if e == epoch for p in batch]
        oracle = np.random.default_rng([7, epoch]).permutation(10)[:9]
        assert drawn == oracle.tolist()


def test_epochs_and_seeds_differ():
    by_seed = [[s.next_batch() for _ in range(6)] for s in (sampler(), sampler(seed=8))]
    assert by_seed[0] != by_seed[1]
    assert [b for _, b in by_seed[0][:3]] != [b for _, b in by_seed[0][3:]]


@pytest.mark.parametrize("stop", range(8))
def test_a_resumed_sampler_continues_as_an_undisturbed_one(stop):
    undisturbed = sampler()
    expected = [undisturbed.next_batch() for _ in range(10)]
    first = sampler()
    got = [first.next_batch() for _ in range(stop)]
    state = json.loads(json.dumps(first.state_dict()))
    second = sampler()
    second.load_state_dict(state)
    got += [second.next_batch() for _ in range(10 - stop)]
    assert got == expected


def test_a_state_can_be_loaded_into_a_sampler_that_has_moved_on():
    s = sampler()
    state = s.state_dict()
    expected = s.next_batch()
    for _ in range(5):
        s.next_batch()
    s.load_state_dict(state)
    assert s.next_batch() == expected


def test_fewer_rows_than_a_batch_are_refused_with_the_numbers():
    message = r"10 < 11: 12 rows read, 2 dropped as too long, 10 left for a batch of 11"
    with pytest.raises(DataError, match=message):
        sampler(10, batch_size=11, num_dropped=2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 8}, "seed 7 -> 8"),
        ({"batch_size": 4}, "batch_size 3 -> 4"),
        ({"num_rows": 11}, "num_rows 10 -> 11"),
        ({"shuffle": False}, "shuffle True -> False"),
    ],
)
def test_a_state_of_another_order_is_refused_by_name(change, named):
    with pytest.raises(CheckpointError, match=named):
        sampler(**change).load_state_dict(sampler().state_dict())


@pytest.mark.parametrize("change", [{"position": 2}, {"position": 12}, {"epoch": -1}])
def test_a_state_with_an_impossible_position_is_refused(change):
    with pytest.raises(CheckpointError, match="multiple of 3 from 0 to 9"):
        sampler().load_state_dict({**sampler().state_dict(), **change})


def test_an_incomplete_state_is_refused_by_key():
    with pytest.raises(CheckpointError, match="lacks position, seed"):
        sampler().load_state_dict(
            {"epoch": 0, "num_rows": 10, "batch_size": 3, "shuffle": True},
        )


@pytest.mark.parametrize("change", [{"batch_size": 0}, {"seed": -1}])
def test_impossible_settings_are_refused(change):
    with pytest.raises(UserError, match="batch_size must be at least 1 and seed at least 0"):
        sampler(**change)


def test_rank_shares_of_a_hand_computed_case():
    batch = list("abcdefgh")
    shares = [rank_share(batch, mini_batch_size=4, dp_rank=r, dp_size=2) for r in range(2)]
    assert shares == [list("abef"), list("cdgh")]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 6, 12])
def test_mini_batches_hold_the_same_prompts_for_every_number_of_ranks(dp_size):
    batch = list(range(100, 136))
    shares = [
        rank_share(batch, mini_batch_size=12, dp_rank=r, dp_size=dp_size) for r in range(dp_size)
    ]
    per_rank = 12 // dp_size
    for m in range(3):
        joined = [row for s in shares for row in s[m * per_rank : (m + 1) * per_rank]]
        assert joined == batch[m * 12 : (m + 1) * 12]


@pytest.mark.parametrize(("mini_batch_size", "dp_size"), [(3, 1), (4, 3), (0, 1)])
def test_shares_that_do_not_divide_are_refused_with_the_numbers(mini_batch_size, dp_size):
    message = f"batch 8, mini_batch_size {mini_batch_size}, data-parallel size {dp_size}"
    with pytest.raises(UserError, match=message):
        rank_share(range(8), mini_batch_size=mini_batch_size, dp_rank=0, dp_size=dp_size)


def test_the_last_full_batch_of_an_epoch_is_its_end():
    sampler = PromptSampler(7, batch_size=3, seed=0, shuffle=True)
    ends, ended = [], [num_ended(sampler)]
    for _ in range(5):
        sampler.next_batch()
        ends.append(sampler.is_at_end)
        ended.append(num_ended(sampler))
    assert ends == [False, True, False, True, False]
    assert ended == [0, 0, 1, 1, 2, 2]  # three batches a step end an epoch in each
