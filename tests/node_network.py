"""Machines of a network, on this one: namespaces with their own address, name and /etc/hosts.

Root alone may make them. Processes in one see only its interfaces, so that a wrong address, a
listener on 127.0.0.1 or a name that leads to oneself fails as it would between two machines. They
share files, like nodes with a common disk.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BRIDGE = "megappobr"
NETWORK = "10.203.7"
HUB = f"{NETWORK}.254"
"""This machine's own address in the network."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A namespace, and how to run something in it."""

    name: str
    address: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The same command on that machine."""
        # Not `ip netns exec`, which hides /sys/fs/cgroup, where slurmd looks.
        enter = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        inside = ["sh", "-c", enter, self.name, str(_hosts_file(self.name)), *arguments]
        return ["nsenter", f"--net=/run/netns/{self.name}", "unshare", "--uts", "--mount", *inside]


def missing() -> str:
    """Why there cannot be such a network here; empty if there can."""
    if os.geteuid() != 0:
        return "needs root"
    tools = ("ip", "nsenter", "unshare", "hostname")
    absent = [tool for tool in tools if shutil.which(tool) is None]
    if absent:
        return f"needs {', '.join(absent)} (tests/install_system.sh)"
    try:
        with network(["megappotry"]) as (node,):
            subprocess.run(node.command(["true"]), check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        return f"this kernel or container refuses network namespaces: {error.cmd} {error.stderr}"
    return ""


@contextmanager
def network(names: Sequence[str]) -> Iterator[list[Node]]:
    """Nodes on one bridge. Debian's habit of giving the own name 127.0.1.1 is kept on purpose."""
    nodes = [Node(name=n, address=f"{NETWORK}.{i}") for i, n in enumerate(names, start=1)]
    _remove(names)
    try:
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{HUB}/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        for i, node in enumerate(nodes):
            _add(node, outer=f"{BRIDGE}{i}", others=[n for n in nodes if n is not node])
        yield nodes
    finally:
        _remove(names)


def _add(node: Node, *, outer: str, others: Sequence[Node]) -> None:
    _ip("netns", "add", node.name)
    hosts = _hosts_file(node.name)
    hosts.parent.mkdir(parents=True)
    lines = ["127.0.0.1 localhost", f"127.0.1.1 {node.name}", f"{HUB} {os.uname().nodename}"]
    lines += [f"{other.address} {other.name}" for other in others]
    hosts.write_text("\n".join(lines) + "\n")
    _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", node.name)
    _ip("link", "set", outer, "master", BRIDGE, "up")
    _ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", "eth0")
    _ip("-n", node.name, "link", "set", "eth0", "up")
    _ip("-n", node.name, "link", "set", "lo", "up")


def _remove(names: Sequence[str]) -> None:
    existing = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    for name in names:
        if name in existing.split():
            _ip("netns", "del", name)
        shutil.rmtree(_hosts_file(name).parent, ignore_errors=True)
    if Path(f"/sys/class/net/{BRIDGE}").exists():
        _ip("link", "del", BRIDGE)


def _hosts_file(name: str) -> Path:
    """Shown to processes of that node as /etc/hosts."""
    return Path("/etc/netns") / name / "hosts"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
