"""One node of a run over several: what launch/node.sh starts, once on each node.

    python -m megappo.node CONFIG.yaml [section.key=value ...]

with NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and GPUS_PER_NODE in the environment. Nothing is
guessed: a node that took localhost for a missing address would train alone. The nodes
meet before torchrun starts (`node_meeting`), so that what is wrong is one message on each, in
seconds, and not a rendezvous that waits. Then torchrun's c10d rendezvous on the same address and
port: it numbers the nodes and, with MAX_RESTARTS, starts the ranks of all of them again together.

Left out: numbers of nodes that change during a run; a run is as wide as it was started.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megappo.checkpoint.compare import flatten
from megappo.config import load_any
from megappo.distributed.early_signals import resumable_before_ranks
from megappo.distributed.environment import check_slurm_nodes, read_slurm_nodes
from megappo.distributed.node_facts import NodeFacts, gather_facts, settings_digest
from megappo.distributed.node_meeting import meet
from megappo.distributed.node_network import interface_towards, is_loopback, own_addresses, resolve
from megappo.errors import EXIT_FAILED, EXIT_USAGE, NodesMissingError, UserError
from megappo.launch import SIGNALS, start_ranks

USAGE = "usage: bash launch/node.sh CONFIG.yaml [section.key=value ...]   (docs/launch.md)"

VARIABLES = {
    "NNODES": "how many nodes the run has, the same on all",
    "NODE_RANK": "this node's number, 0 to NNODES - 1",
    "MASTER_ADDR": "node 0's address as the other nodes reach it, the same on all",
    "MASTER_PORT": "a free port on node 0, the same on all",
    "GPUS_PER_NODE": "ranks to start here, one a GPU, the same on all",
}
_DEFAULT_WAIT_S = 60.0
"""Where this node's config cannot be read, which the others shall know."""
_RENDEZVOUS_SPARE_S = 60
"""What nodes have beyond `node_wait_s` to come to the rendezvous: before it they import torch, in a
restart they first stop their ranks, for which torchrun takes up to 30 s."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """What this node was told."""

    num_nodes: int
    node: int
    address: str
    port: int
    ranks: int
    max_restarts: int

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Place:
        """From the environment's variables; says all that is wrong with them at once.

        Raises:
            UserError: one is missing or has a value that cannot be.
        """
        missing = [name for name in VARIABLES if not environment.get(name, "").strip()]
        if missing:
            raise UserError(
                "nothing is guessed here, and these variables are not set:\n"
                + "\n".join(f"  {name}: {VARIABLES[name]}" for name in missing)
            )
        texts = {name: environment[name].strip() for name in VARIABLES}
        texts["MAX_RESTARTS"] = environment.get("MAX_RESTARTS", "0").strip()
        numbers = {n: int(t) for n, t in texts.items() if n != "MASTER_ADDR" and t.isdigit()}
        wrong = [
            f"  {name} is {text!r}, which is no number"
            for name, text in texts.items()
            if name != "MASTER_ADDR" and name not in numbers
        ]
        if not wrong:
            wrong = list(_impossible(numbers))
        if wrong:
            raise UserError("these variables are wrong:\n" + "\n".join(wrong))
        return cls(
            num_nodes=numbers["NNODES"],
            node=numbers["NODE_RANK"],
            address=texts["MASTER_ADDR"],
            port=numbers["MASTER_PORT"],
            ranks=numbers["GPUS_PER_NODE"],
            max_restarts=numbers["MAX_RESTARTS"],
        )


def _impossible(numbers: Mapping[str, int]) -> Sequence[str]:
    nodes, port = numbers["NNODES"], numbers["MASTER_PORT"]
    found = [
        f"  {n} is 0; it must be 1 or more" for n in ("NNODES", "GPUS_PER_NODE") if not numbers[n]
    ]
    if nodes and numbers["NODE_RANK"] >= nodes:
        found.append(
            f"  NODE_RANK is {numbers['NODE_RANK']} and NNODES {nodes}: nodes are numbered from 0 "
            f"to {nodes - 1}"
        )
    if not 0 < port < 2**16:
        found.append(f"  MASTER_PORT is {port}; ports go from 1 to 65535")
    return found


def main(arguments: Sequence[str]) -> int:
    """Meets the other nodes, starts this one's ranks and returns the run's exit code."""
    if not arguments:
        sys.stderr.write(USAGE + "\n")
        return EXIT_USAGE
    with resumable_before_ranks(SIGNALS.split(",")):
        return _meet_and_run(arguments)


def _meet_and_run(arguments: Sequence[str]) -> int:
    try:
        options = _prepare(Place.read(os.environ), arguments)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    except NodesMissingError as error:
        sys.stderr.write(f"failed: {error}\n")
        return EXIT_FAILED
    # torchrun shares one store between restarts unless told not to, and its ranks would find the
    # addresses of those before them in it.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return start_ranks(options, arguments)


def _prepare(place: Place, arguments: Sequence[str]) -> list[str]:
    """Checks and the meeting; returns torchrun's options.

    Raises:
        UserError: something is wrong here or on another node.
        NodesMissingError: nodes did not come.
    """
    if place.num_nodes > 1 or read_slurm_nodes() > 1:
        check_slurm_nodes(place.num_nodes, read_slurm_nodes())
    ip = resolve(place.address)
    own = ip
    if place.num_nodes > 1:
        _check_address(place, ip)
        own = interface_towards(ip)[1]
    facts, wait_s = _facts(place, own, arguments)
    run_id = meet(facts, ip=ip, port=place.port, num_nodes=place.num_nodes, wait_s=wait_s)
    sys.stdout.write(
        f"{facts.name} of {place.num_nodes}: all are there and alike "
        f"(config and versions {settings_digest(facts)})\n"
    )
    sys.stdout.flush()
    host = f"[{ip}]" if ":" in ip else ip
    return [
        f"--nnodes={place.num_nodes}",
        f"--nproc-per-node={place.ranks}",
        f"--max-restarts={place.max_restarts}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={host}:{place.port}",
        f"--rdzv-id={run_id}",
        f"--rdzv-conf=is_host={'true' if place.node == 0 else 'false'},"
        f"join_timeout={math.ceil(wait_s) + _RENDEZVOUS_SPARE_S}",
        f"--local-addr={own}",
    ]


def _check_address(place: Place, ip: str) -> None:
    if not is_loopback(ip):
        return
    known = ", ".join(f"{address} ({name})" for address, name in own_addresses().items())
    raise UserError(
        f"MASTER_ADDR is {place.address!r}, which is {ip} here, and NNODES is {place.num_nodes}: "
        "each node would find itself there; give node 0's address in the network of the nodes"
        + (f" (this machine has {known})" if known else "")
    )


def _facts(place: Place, own: str, arguments: Sequence[str]) -> tuple[NodeFacts, float]:
    """This node's facts and how long to wait; a config that is wrong here is told to the others."""
    settings: Mapping[str, object] = {}
    wait_s, problem = _DEFAULT_WAIT_S, ""
    try:
        config = load_any(arguments[0], arguments[1:])
        settings, wait_s = flatten(config), config.trainer.node_wait_s
    except UserError as error:
        problem = str(error)
    facts = gather_facts(
        settings,
        node=place.node,
        address=own,
        num_nodes=place.num_nodes,
        local_world_size=place.ranks,
        problem=problem,
    )
    return facts, wait_s


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
