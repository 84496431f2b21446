import pytest

from megappo.trainer.evaluate import ROWS_AT_ONCE, blocks


@pytest.mark.parametrize("num_rows", [1, 5, 2 * ROWS_AT_ONCE, 2 * ROWS_AT_ONCE + 1])
def test_ranks_ask_equally_often_and_share_all_rows_out(num_rows):
    shares = [blocks(num_rows, rank=rank, world_size=2) for rank in range(2)]
    assert len(shares[0]) == len(shares[1]) == -(-num_rows // (2 * ROWS_AT_ONCE))
    rows = [row for share in shares for block in share for row in block]
    assert sorted(rows) == list(range(num_rows))
    assert max(len(block) for share in shares for block in share) <= ROWS_AT_ONCE
