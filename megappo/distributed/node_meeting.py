"""The nodes of a run meet before torchrun starts: all there and alike, or all end with one message.

torchrun's own rendezvous ends a missing node, a wrong address or a busy port in a traceback after
minutes, and does not look at configs at all. Here node 0 listens on MASTER_ADDR:MASTER_PORT, each
other node sends one line of JSON about itself, and gets one line back: the verdict, the same for
all. The port is then free again for torchrun. Only plain sockets, so that it takes no time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from megappo.distributed.node_facts import NodeFacts, find_problem
from megappo.errors import NodesMissingError, UserError

_GREETING = "megappo nodes 1"
_LINE_BYTES = 2**20
"""Longest line that is read: a config has a few kilobytes."""
_SPARE_S = 5.0
"""What a node waits for the verdict beyond the time that node 0 waits for the others."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of the meeting."""

    run_id: str = ""
    """made by node 0, for torchrun's rendezvous"""
    problem: str = ""
    nodes_missing: bool = False
    """the problem is that nodes did not come, not that they differ"""


def meet(facts: NodeFacts, *, ip: str, port: int, num_nodes: int, wait_s: float) -> str:
    """Waits for all nodes and compares them; returns an id of the run, the same on all.

    Args:
        facts: of this node.
        ip: of node 0.
        port: on node 0, free.
        num_nodes: how many there are.
        wait_s: how long nodes wait for each other, seconds.

    Raises:
        UserError: nodes differ, one has a problem, or the address or port cannot be used.
        NodesMissingError: not all nodes came, or node 0 cannot be reached.
    """
    if facts.node == 0:
        verdict = asyncio.run(_Host(facts, num_nodes).run(ip, port, wait_s))
    else:
        verdict = _ask(facts, ip, port, wait_s)
    if verdict.nodes_missing:
        raise NodesMissingError(verdict.problem)
    if verdict.problem:
        raise UserError(verdict.problem)
    return verdict.run_id


class _Host:
    """Node 0's side."""

    def __init__(self, facts: NodeFacts, num_nodes: int) -> None:
        self._nodes = {0: facts}
        self._num_nodes = num_nodes
        self._left: dict[int, NodeFacts] = {}
        self._twice = ""
        self._complete = asyncio.Event()
        self._given = asyncio.Event()
        self._verdict = Verdict()
        self._answers: set[asyncio.Task[None]] = set()

    async def run(self, ip: str, port: int, wait_s: float) -> Verdict:
        """Listens until all have come or the time is over, then answers all."""
        server = await self._listen(ip, port)
        if self._num_nodes == 1:
            self._complete.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._complete.wait(), wait_s)
        self._verdict = self._judge(wait_s)
        self._given.set()
        server.close()
        if self._answers:
            await asyncio.wait(self._answers, timeout=_SPARE_S)
        return self._verdict

    async def _listen(self, ip: str, port: int) -> asyncio.Server:
        try:
            return await asyncio.start_server(
                self._serve, ip, port, limit=_LINE_BYTES, backlog=4096
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(
                    f"MASTER_PORT {port} is in use on node 0 ({self._nodes[0].host}, {ip}), by "
                    "another run or program: give all nodes another one"
                ) from error
            if error.errno == errno.EADDRNOTAVAIL:
                raise UserError(
                    f"NODE_RANK is 0 on {self._nodes[0].host}, and MASTER_ADDR ({ip}) is not an "
                    "address of this machine: MASTER_ADDR must be node 0's own"
                ) from error
            raise UserError(f"node 0 cannot listen on {ip}:{port}: {error}") from error

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._answers.add(task)
        try:
            facts = self._note(await reader.readline())
            if facts is None:
                return
            if await self._leaves(reader):
                self._forget(facts)
                return
            writer.write((json.dumps(asdict(self._verdict)) + "\n").encode())
            await writer.drain()
        except (ConnectionError, ValueError):
            pass  # a line that is too long, or a peer that left: no node of ours
        finally:
            self._answers.discard(task)
            writer.close()

    async def _leaves(self, reader: asyncio.StreamReader) -> bool:
        """Waits for the verdict; True if the node's connection ends before that."""
        given = asyncio.ensure_future(self._given.wait())
        end = asyncio.ensure_future(_wait_for_end(reader))
        await asyncio.wait([given, end], return_when=asyncio.FIRST_COMPLETED)
        given.cancel()
        end.cancel()
        return not self._given.is_set()

    def _forget(self, facts: NodeFacts) -> None:
        """A node that ended can be started again under its number, and is missing until then."""
        if self._nodes.get(facts.node) is facts:
            self._left[facts.node] = self._nodes.pop(facts.node)
            if not self._twice:
                self._complete.clear()

    def _note(self, line: bytes) -> NodeFacts | None:
        """Takes a node's line; None if it is none."""
        greeting, _, text = line.decode(errors="replace").partition(" : ")
        if greeting != _GREETING:
            return None
        facts = NodeFacts.from_json(text)
        seen = self._nodes.setdefault(facts.node, facts)
        if seen is not facts:
            self._twice = f"NODE_RANK {facts.node} is given twice: {seen.name} and {facts.name}"
        if self._twice or len(self._nodes) >= self._num_nodes:
            self._complete.set()
        return facts

    def _judge(self, wait_s: float) -> Verdict:
        nodes = [self._nodes[number] for number in sorted(self._nodes)]
        problem = self._twice or find_problem(nodes)
        if problem:
            return Verdict(problem=problem)
        missing = sorted(set(range(self._num_nodes)) - set(self._nodes))
        if missing:
            named = ", ".join(map(str, missing[:20])) + (" ..." if len(missing) > 20 else "")
            left = [self._left[number] for number in missing if number in self._left]
            ended = f"; {_names(left)} came and ended" if left else ""
            return Verdict(
                problem=f"{len(missing)} of {self._num_nodes} nodes did not come within "
                f"{wait_s:g} s (trainer.node_wait_s), with NODE_RANK {named}; there were "
                f"{_names(nodes)}{ended}: look at the output of the missing ones",
                nodes_missing=True,
            )
        return Verdict(run_id=secrets.token_hex(8))


async def _wait_for_end(reader: asyncio.StreamReader) -> None:
    """Of a node's connection; it says nothing after its line."""
    with contextlib.suppress(ConnectionError):
        await reader.read(1)


def _names(nodes: Sequence[NodeFacts]) -> str:
    return ", ".join(node.name for node in nodes[:8]) + (" ..." if len(nodes) > 8 else "")


def _ask(facts: NodeFacts, ip: str, port: int, wait_s: float) -> Verdict:
    """Another node's side."""
    line = f"{_GREETING} : {facts.to_json()}\n".encode()
    with _connect(facts, ip, port, wait_s) as connection:
        connection.settimeout(wait_s + _SPARE_S)
        try:
            connection.sendall(line)
            if answer := connection.makefile("r").readline():
                return Verdict(**json.loads(answer))
        except ConnectionError:
            pass  # it ended before it had read all
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"what listens on {ip}:{port} is not node 0 of this run, or it ended: no verdict "
                f"came from it ({error}); is MASTER_PORT used by something else there?"
            ) from error
    raise NodesMissingError(
        f"node 0, or what else listens on {ip}:{port}, ended before its verdict: look at its "
        "output; is MASTER_PORT used by something else there?"
    )


def _connect(facts: NodeFacts, ip: str, port: int, wait_s: float) -> socket.socket:
    deadline = time.monotonic() + wait_s
    last: OSError | None = None
    while (left := deadline - time.monotonic()) > 0:
        try:
            return socket.create_connection((ip, port), timeout=min(left, 5.0))
        except OSError as error:  # node 0 may not be up yet
            last = error
            time.sleep(min(0.2, left))
    raise NodesMissingError(
        f"{facts.name} could not reach node 0 at {ip}:{port} (MASTER_ADDR, MASTER_PORT) within "
        f"{wait_s:g} s (trainer.node_wait_s): {last}; is that node 0's address, is launch/node.sh "
        "running there with the same port, and do firewalls let it through?"
    )
