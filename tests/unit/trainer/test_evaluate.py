import pytest

from megappo.config.reward_model import RewardModelSection
from megappo.trainer.evaluate import ROWS_AT_ONCE, blocks, val_score


@pytest.mark.parametrize("num_rows", [1, 5, 2 * ROWS_AT_ONCE, 2 * ROWS_AT_ONCE + 1])
def test_ranks_ask_equally_often_and_share_all_rows_out(num_rows):
    shares = [blocks(num_rows, rank=rank, world_size=2) for rank in range(2)]
    assert len(shares[0]) == len(shares[1]) == -(-num_rows // (2 * ROWS_AT_ONCE))
    rows = [row for share in shares for block in share for row in block]
    assert sorted(rows) == list(range(num_rows))
    assert max(len(block) for share in shares for block in share) <= ROWS_AT_ONCE


def test_the_best_checkpoint_is_that_of_the_score_which_is_trained_on():
    rules, both = {"val/score/mean": 0.5}, {"val/score/mean": 0.5, "val/reward_model/mean": -1.5}
    assert val_score({}, RewardModelSection()) is None
    assert val_score(rules, RewardModelSection()) == 0.5
    model = RewardModelSection(path="rm", weight=2.0, rule_weight=0.25)
    assert val_score({}, model) is None
    assert val_score(both, model) == 2.0 * -1.5 + 0.25 * 0.5
