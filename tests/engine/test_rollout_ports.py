import socket

import pytest

from megappo.errors import UserError
from megappo.rollout.ports import BLOCK, ephemeral_start, reserve_ports

BASE = 20480


def test_local_ranks_get_ports_that_do_not_overlap():
    given = [port for rank in range(8) for port in reserve_ports(2, local_rank=rank, base=BASE)]
    assert len(set(given)) == 16


def test_ports_lie_below_those_that_the_kernel_hands_out():
    assert max(reserve_ports(3, local_rank=7, base=BASE)) < ephemeral_start()


def test_a_port_in_use_is_passed_over():
    first, second = reserve_ports(2, local_rank=0, base=BASE)
    with socket.socket() as other:
        other.bind(("127.0.0.1", first))
        assert reserve_ports(1, local_rank=0, base=BASE) == [second]


def test_a_block_without_free_ports_is_an_error_with_numbers():
    with pytest.raises(UserError, match=rf"needs {BLOCK + 1} free ports of {BASE} to {BASE + 31}"):
        reserve_ports(BLOCK + 1, local_rank=0, base=BASE)


def test_a_base_inside_the_kernels_range_is_refused():
    with pytest.raises(UserError, match="lower port_base"):
        reserve_ports(1, local_rank=0, base=ephemeral_start())
