"""Ranks of several nodes agree, before models and groups, that they are one run.

However the ranks were started (launch/node.sh has looked before; plain torchrun has not), the nodes
compare config, versions and ranks here, and a node whose checks fail takes the others with it
instead of leaving them in a rendezvous. All of it over the store that torchrun's agents have.

torchrun keeps that store when it restarts the ranks, with the keys of ranks that are gone, and the
restart counts of nodes differ. So the live ranks first find each other, by numbers that nobody used
before, and go on below a name of their own.
"""

from __future__ import annotations

import datetime
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megappo.distributed.environment import LaunchEnvironment
from megappo.distributed.node_facts import NodeFacts, find_problem, settings_digest
from megappo.errors import NodesMissingError, UserError

_POLL_S = 0.05
_LINGER_S = 5.0
"""How long a rank that ends waits for the others to read why: the store may end with it."""


class NodeAgreement:
    """The ranks' common store, and what they settle over it."""

    def __init__(self, launch: LaunchEnvironment, store: dist.Store, host: str) -> None:
        self._launch = launch
        self._host = host
        self.store = store
        """below a name that this start of the ranks alone uses"""

    @classmethod
    def join(cls, launch: LaunchEnvironment, *, host: str, wait_s: float) -> NodeAgreement:
        """Finds the live ranks. Collective over the world.

        Args:
            launch: from torchrun.
            host: this node's name, for messages.
            wait_s: how long ranks wait for each other, seconds.

        Raises:
            NodesMissingError: a rank did not come in this time.
        """
        timeout = datetime.timedelta(seconds=wait_s)
        try:
            store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        except RuntimeError as error:
            raise NodesMissingError(
                f"rank {launch.rank} ({host}) could not reach rank 0 at {launch.address}:"
                f"{os.environ.get('MASTER_PORT')} within {wait_s:g} s (trainer.node_wait_s): "
                f"{str(error).splitlines()[0]}"
            ) from error
        find = _find_others if launch.rank == 0 else _find_main
        return cls(launch, dist.PrefixStore(find(launch, store, wait_s), store), host)

    def compare(self, facts: NodeFacts, *, wait_s: float) -> str:
        """Compares the nodes; returns what they have in common, in words.

        Collective over the world.

        Raises:
            UserError: they differ. On all ranks alike.
            NodesMissingError: no answer in `wait_s`.
        """
        launch, store = self._launch, self.store
        if launch.local_rank == 0:
            store.set(f"restarts/{launch.node}", str(launch.restarts))
            store.set(f"facts/{launch.node}", facts.to_json())
        if launch.rank == 0:
            keys = [f"facts/{node}" for node in range(launch.num_nodes)]
            self._wait(keys, "the facts of all nodes", wait_s)
            nodes = [NodeFacts.from_json(store.get(key).decode()) for key in keys]
            store.set("alike", find_problem(nodes))
        self._wait(["alike"], "what rank 0 found when it compared the nodes", wait_s)
        if problem := store.get("alike").decode():
            self._linger("alike")
            raise UserError(problem)
        versions = ", ".join(
            f"{name} {facts.settings[name]}" for name in ("torch", "megatron-core", "sglang")
        )
        return (
            f"{launch.num_nodes}, alike: config and versions {settings_digest(facts)}, {versions}"
        )

    def restarts(self) -> int:
        """How often the ranks were started again, for rank 0; after `compare`.

        torchrun counts on the node whose rank failed alone: the largest count is taken.
        """
        told = [self.store.get(f"restarts/{node}") for node in range(self._launch.num_nodes)]
        return max(map(int, told))

    @contextmanager
    def all_or_none(self, *, wait_s: float) -> Iterator[None]:
        """Runs checks; where they fail on one rank, all ranks end with that rank's message.

        Collective over the world.
        """
        try:
            yield
        except Exception as error:
            text = f"rank {self._launch.rank} ({self._host}): {error}"
            self.store.set("checked", text)
            self._linger("checked")
            raise
        passed = self.store.add("passed", 1)
        if passed == self._launch.world_size:
            self.store.set("checked", "")
        self._wait(["checked"], "the checks of all ranks", wait_s)
        if problem := self.store.get("checked").decode():
            self._linger("checked")
            raise UserError(problem)

    def _wait(self, keys: list[str], what: str, wait_s: float) -> None:
        try:
            self.store.wait(keys, datetime.timedelta(seconds=wait_s))
        except dist.DistError as error:
            raise NodesMissingError(
                f"rank {self._launch.rank} ({self._host}) waited {wait_s:g} s for {what}: another "
                "node ended or hangs; look at its output"
            ) from error

    def _linger(self, name: str) -> None:
        """Leaves when the others know, too: torchrun ends the store with the first rank."""
        deadline = time.monotonic() + _LINGER_S
        seen = self.store.add(f"{name}/seen", 1)
        while seen < self._launch.world_size and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            seen = self.store.add(f"{name}/seen", 0)


def _find_others(launch: LaunchEnvironment, store: dist.Store, wait_s: float) -> str:
    """Rank 0 answers every number that it sees, until all ranks of this start say that they know.

    A number of an earlier start is answered too; nobody hears it.
    """
    name = f"start-{secrets.token_hex(8)}"
    deadline = time.monotonic() + wait_s
    answered: dict[int, str] = {}
    others = range(1, launch.world_size)
    while store.add(f"{name}/known", 0) < len(others):
        for rank in others:
            if not store.check([f"rank/{rank}"]):
                continue
            number = store.get(f"rank/{rank}").decode()
            if answered.get(rank) != number:
                store.set(f"answer/{number}", name)
                answered[rank] = number
        if time.monotonic() > deadline:
            missing = [rank for rank in others if rank not in answered]
            raise NodesMissingError(
                f"{len(missing)} of {launch.world_size} ranks did not come within {wait_s:g} s "
                f"(trainer.node_wait_s): {missing[:16]}; look at the output of their nodes"
            )
        time.sleep(_POLL_S)
    return name


def _find_main(launch: LaunchEnvironment, store: dist.Store, wait_s: float) -> str:
    """Another rank shows a new number and waits until rank 0 has answered it."""
    number = secrets.token_hex(8)
    store.set(f"rank/{launch.rank}", number)
    try:
        store.wait([f"answer/{number}"], datetime.timedelta(seconds=wait_s))
    except dist.DistError as error:
        raise NodesMissingError(
            f"rank {launch.rank} waited {wait_s:g} s (trainer.node_wait_s) for rank 0 at "
            f"{launch.address}: it ended or did not start; look at its node's output"
        ) from error
    name: str = store.get(f"answer/{number}").decode()
    store.add(f"{name}/known", 1)
    return name
