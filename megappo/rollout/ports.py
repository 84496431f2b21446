"""Ports for engines that start at the same time on one host.

SGLang's processes bind their port many seconds after it was chosen. So that nobody takes it
meanwhile, each local rank has a block of its own, below the range from which the kernel hands out
ports to outgoing connections; a port is test-bound before use; and it is held by a lock that every
run on the host honours. A port that another program holds is passed over. What no lock prevents is
a foreign program that takes the port after the test: the caller starts again then.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

from megappo.errors import UserError

DEFAULT_BASE = 21000
BLOCK = 32
"""Ports of one local rank: many more than one engine needs, for those in use."""

_KERNEL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_IANA_EPHEMERAL_START = 49152


class PortReservation:
    """Ports that no other reservation on this host gets until `release` or this process's end."""

    def __init__(self, ports: tuple[int, ...], locks: ExitStack) -> None:
        self.ports = ports
        """Ascending."""
        self._locks = locks

    def release(self) -> None:
        """Gives the ports back; may be called twice."""
        self._locks.close()


def reserve_ports(count: int, *, local_rank: int, base: int = DEFAULT_BASE) -> PortReservation:
    """The first free ports of this local rank's block.

    Args:
        count: how many.
        local_rank: number of this process on its host.
        base: first port of local rank 0.

    Raises:
        UserError: the block reaches into the kernel's range, or holds too few free ports.
    """
    block = block_of(local_rank, base)
    first, last = block[0], block[-1]
    limit = _limit()
    if first < 1024 or last >= limit:
        raise UserError(
            f"local rank {local_rank} needs ports {first} to {last}, which must lie between 1024 "
            f"and {limit - 1} (from {limit} on the kernel hands them out itself): lower port_base, "
            f"now {base}"
        )
    with ExitStack() as locks:
        free: list[int] = []
        for port in block:
            if len(free) < count and _take(port, locks):
                free.append(port)
        if len(free) < count:
            raise UserError(
                f"local rank {local_rank} needs {count} free ports of {first} to {last} and found "
                f"{len(free)}: other runs may be using them; set another port_base, now {base}"
            )
        return PortReservation(tuple(free), locks.pop_all())


def block_of(local_rank: int, base: int = DEFAULT_BASE) -> range:
    """The ports of a local rank, whether they can be had or not."""
    first = base + local_rank * BLOCK
    return range(first, first + BLOCK)


def num_free_ports(local_rank: int, base: int = DEFAULT_BASE) -> int:
    """Ports of a local rank's block that nobody holds now, and that the kernel does not hand out.

    One is tried at a time: an engine that starts meanwhile finds the others free.
    """
    return sum(port < _limit() and _is_free(port) for port in block_of(local_rank, base))


def _limit() -> int:
    """Ports for engines lie below it."""
    return min(ephemeral_start(), 65536)


def ephemeral_start() -> int:
    """First port of those that the kernel gives to outgoing connections."""
    if not _KERNEL_RANGE.exists():
        return _IANA_EPHEMERAL_START
    return int(_KERNEL_RANGE.read_text().split()[0])


def _take(port: int, locks: ExitStack) -> bool:
    """Locks a port that can be bound; False if it is locked or in use."""
    # A name in Linux's abstract namespace: it vanishes with the process, and is seen by exactly
    # those that share the ports, as both belong to the network namespace.
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        lock.bind(f"\0megappo-port-{port}")
    except OSError:
        lock.close()
        return False
    if not _can_bind(port):
        lock.close()
        return False
    locks.enter_context(lock)
    return True


def _is_free(port: int) -> bool:
    with ExitStack() as locks:
        return _take(port, locks)


def _can_bind(port: int) -> bool:
    # On all interfaces and without SO_REUSEADDR: the strictest test, as SGLang may bind either way.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
