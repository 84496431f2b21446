"""The benchmark of optimizer state starts real ranks and counts what they hold."""

import pytest

from tools.bench import optimizer_memory

pytestmark = pytest.mark.distributed


def test_ranks_hold_their_share_of_moments_and_main_parameters():
    """bfloat16: two moments and the main parameter, float32 each, once over all ranks."""
    ranks = optimizer_memory.launch_ranks(2, "bfloat16")
    assert [m.rank for m in ranks] == [0, 1]
    for m in ranks:
        assert m.params_bytes == pytest.approx(2 * m.parameters, rel=0.01)
        assert m.grads_bytes == pytest.approx(4 * m.parameters, rel=0.01)
        assert m.optimizer_bytes == pytest.approx(12 * m.parameters / 2, rel=0.01)
