import math

import pytest
import torch

from megappo.ppo.advantages import GROUP_KINDS, group_advantages
from megappo.ppo.returns import outcomes, returns_to_go, spread


def test_an_outcome_is_the_sum_over_trained_tokens():
    rewards = torch.tensor([[1.0, math.nan, 2.0], [5.0, 5.0, 5.0]])
    mask = torch.tensor([[True, False, True], [False, False, False]])
    assert outcomes(rewards, mask).tolist() == [3.0, 0.0]


def test_returns_to_go_are_discounted_by_trained_tokens_alone():
    rewards = torch.tensor([[1.0, math.nan, 2.0, 4.0]])
    mask = torch.tensor([[True, False, True, True]])
    # 4, 2 + 4/2, 1 + 4/2: the masked slot is no step.
    assert returns_to_go(rewards, mask, gamma=0.5).tolist() == [[3.0, 0.0, 4.0, 4.0]]


def test_a_discount_outside_the_unit_interval_is_refused():
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\], got 1.5"):
        returns_to_go(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), gamma=1.5)


def test_every_trained_token_gets_its_samples_advantage():
    mask = torch.tensor([[True, False, True], [False, True, False]])
    expected = [[2.0, 0.0, 2.0], [0.0, -1.0, 0.0]]
    assert spread(torch.tensor([2.0, -1.0]), mask).tolist() == expected


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_a_sample_that_does_not_count_changes_nothing_of_its_group(kind):
    scores = torch.tensor([1.0, 99.0, 0.0, 3.0, math.nan])
    groups = torch.tensor([7, 7, 7, 8, 8])
    counted = torch.tensor([True, False, True, True, False])
    found = group_advantages(scores, groups, kind=kind, counted=counted)
    expected = group_advantages(scores[[0, 2]], groups[[0, 2]], kind=kind)
    assert found[[0, 2]].tolist() == expected.tolist()
    assert found[[1, 3, 4]].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_a_group_of_which_no_sample_counts_gives_zeros(kind):
    none = torch.zeros(2, dtype=torch.bool)
    ids = torch.zeros(2, dtype=torch.long)
    found = group_advantages(torch.ones(2), ids, kind=kind, counted=none)
    assert found.tolist() == [0.0, 0.0]
