import socket
import subprocess
import sys

import pytest

from megappo.errors import UserError
from megappo.rollout.ports import BLOCK, block_of, ephemeral_start, num_free_ports, reserve_ports

BASE = 20480


@pytest.fixture
def reserve():
    """`reserve_ports` from BASE on; gives everything back after the test."""
    held = []

    def reserve(count: int, *, local_rank: int = 0, base: int = BASE) -> tuple[int, ...]:
        held.append(reserve_ports(count, local_rank=local_rank, base=base))
        return held[-1].ports

    yield reserve
    for reservation in held:
        reservation.release()


def test_local_ranks_get_ports_that_do_not_overlap(reserve):
    given = [port for rank in range(8) for port in reserve(2, local_rank=rank)]
    assert len(set(given)) == 16


def test_ports_lie_below_those_that_the_kernel_hands_out(reserve):
    assert max(reserve(3, local_rank=7)) < ephemeral_start()


def test_a_port_in_use_is_passed_over(reserve):
    first, second = reserve_and_release(2)
    with socket.socket() as other:
        other.bind(("127.0.0.1", first))
        assert reserve(1) == (second,)


def test_a_reserved_port_is_not_given_to_another_run(reserve):
    (first,) = reserve(1)
    code = (
        "from megappo.rollout.ports import reserve_ports;"
        f"print(reserve_ports(1, local_rank=0, base={BASE}).ports[0])"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert int(other) > first
    # That run has ended, and its port is free again.
    assert reserve(1) == (int(other),)


def test_a_block_without_free_ports_is_an_error_with_numbers():
    with pytest.raises(UserError, match=rf"needs {BLOCK + 1} free ports of {BASE} to {BASE + 31}"):
        reserve_ports(BLOCK + 1, local_rank=0, base=BASE)
    assert len(reserve_and_release(2)) == 2, "a failed reservation holds nothing"


def test_a_base_inside_the_kernels_range_is_refused():
    with pytest.raises(UserError, match="lower port_base"):
        reserve_ports(1, local_rank=0, base=ephemeral_start())


def reserve_and_release(count: int) -> tuple[int, ...]:
    reservation = reserve_ports(count, local_rank=0, base=BASE)
    reservation.release()
    return reservation.ports


def test_free_ports_are_counted_and_left_free(reserve):
    before = num_free_ports(9, BASE)
    taken = reserve(3, local_rank=9)
    assert set(taken) <= set(block_of(9, BASE))
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port_of(9, taken)))
        assert num_free_ports(9, BASE) == before - 4
    assert num_free_ports(9, BASE) == before - 3
    assert num_free_ports(0, ephemeral_start()) == 0


def free_port_of(local_rank, taken):
    """One that is free beside those that are taken: it is reserved, and given back."""
    reservation = reserve_ports(1, local_rank=local_rank, base=BASE)
    reservation.release()
    assert reservation.ports[0] not in taken
    return reservation.ports[0]
