"""A process group with an engine of another program, over which weights go to it.

Rank 0 is this process, which sends; the others are the engine's processes, each of which receives
everything. The group stands outside torchrun's world: this side opens a store on a port of its own,
the engine is told address and port, and both build the group from there, as SGLang's
`init_weights_update_group` expects it.

The store listens on the one address that the engine is told, not on all.

PyTorch has no public function for a group beside its world; both sides call the private one that
`init_process_group` calls, which torch's pinned version holds still.
"""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world

_POLL_S = 0.001


class UpdateGroupFailed(RuntimeError):  # noqa: N818, a state and not a mistake
    """The engine's processes did not come, are gone, or did not take what was sent."""


class UpdateGroup:
    """This process's end of the group. `join` completes it, `close` leaves it."""

    def __init__(
        self, name: str, *, address: str, num_receivers: int, backend: str, timeout_s: float
    ) -> None:
        """Opens the store.

        Args:
            name: of the group, the same on both sides.
            address: of this host, as the engine reaches it.
            num_receivers: the engine's processes.
            backend: `gloo` or `nccl`.
            timeout_s: of one broadcast, seconds.

        Raises:
            UpdateGroupFailed: this host cannot listen on that address.
        """
        self.name, self.address, self.backend = name, address, backend
        self.size = 1 + num_receivers
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._group: Any = None
        try:
            family, *_ = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server((address, 0), family=family, backlog=self.size)
        except (OSError, UnicodeError) as error:
            raise UpdateGroupFailed(f"cannot listen on {address}: {error}") from error
        self.port: int = listener.getsockname()[1]
        self._store = TCPStore(
            address,
            self.port,
            self.size,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def join(self, *, arrival_timeout_s: float, given_up: Callable[[], bool]) -> None:
        """Waits for the engine's processes and builds the group with them.

        Args:
            arrival_timeout_s: for the first of them to reach the store.
            given_up: whether they will not come any more.

        Raises:
            UpdateGroupFailed: they did not come.
        """
        deadline = time.monotonic() + arrival_timeout_s
        while self._store.num_keys() == 0:
            if given_up() or time.monotonic() > deadline:
                raise UpdateGroupFailed(
                    f"no process of the engine reached {self.address}:{self.port} within "
                    f"{arrival_timeout_s:g} s"
                )
            time.sleep(_POLL_S)
        try:
            group, _ = _new_process_group_helper(
                self.size,
                0,
                [],
                Backend(self.backend),
                PrefixStore(self.name, self._store),
                group_name=self.name,
                timeout=self._timeout,
            )
        except RuntimeError as error:
            raise UpdateGroupFailed(f"the engine's processes did not join: {error}") from error
        _world.pg_group_ranks[group] = {rank: rank for rank in range(self.size)}
        self._group = group

    def send(self, tensor: Tensor, *, given_up: Callable[[], bool]) -> None:
        """Broadcasts a contiguous tensor to the engine's processes and waits until it is out.

        Args:
            tensor: on the backend's device.
            given_up: whether the engine will not take it any more.

        Raises:
            UpdateGroupFailed: the engine is gone, or did not take it.
        """
        assert self._group is not None, "join() comes first"
        try:
            work = self._group.broadcast(tensor, 0)
            while not work.is_completed():
                if given_up():
                    raise UpdateGroupFailed("the engine does not take what is sent")
                time.sleep(_POLL_S)
            work.wait()
        except UpdateGroupFailed:
            raise
        except RuntimeError as error:
            raise UpdateGroupFailed(str(error).partition("\n")[0]) from error

    def close(self) -> None:
        """Leaves the group; may be called twice.

        Waits for a broadcast that is under way, which fails once the engine has left: tell it to.
        """
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)


def address_towards(host: str, port: int) -> str:
    """This host's address on the way to another one; nothing is sent."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
