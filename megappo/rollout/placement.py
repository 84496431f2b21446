"""Which ranks own an engine, and which ranks share prompts: pure functions of the layout.

Where servers of others generate, all ranks are one sharing domain, and `config.servers` says which
rank is whose.

Legend: a *replica* is the TP x CP x PP ranks that train on the same samples; a *rollout group* is
`rollout.tp` consecutive ranks with one engine, which its first rank owns. Replicas need not be
consecutive (pipeline stages are far apart), so a group may reach into several replicas and a
replica into several groups. A *sharing domain* is a smallest set of ranks that holds whole replicas
and whole groups: prompts and answers travel inside it and nowhere else.

Left out: keeping the responses to one prompt on one engine. It would help a prefix cache alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Placement:
    """One rank's place among the engines."""

    rank: int
    owner_ranks: frozenset[int]
    """ranks of the run that own an engine"""
    members: tuple[int, ...]
    """ranks of this rank's sharing domain, ascending"""
    group: Any
    """gloo, the ranks of `members`"""

    @property
    def owns_engine(self) -> bool:
        """Whether this rank starts its rollout group's engine, or uses a server for all."""
        return self.rank in self.owner_ranks

    @property
    def owners(self) -> list[int]:
        """Places in `members` of the ranks that own an engine."""
        return [place for place, rank in enumerate(self.members) if rank in self.owner_ranks]


def sharing_domains(replicas: Sequence[Sequence[int]], tp: int) -> list[list[int]]:
    """The sharing domains of a run, each ascending.

    Args:
        replicas: the ranks of each replica; together every rank of the run once.
        tp: ranks of a rollout group; divides the number of all ranks.
    """
    world_size = sum(len(replica) for replica in replicas)
    assert world_size % tp == 0, f"{world_size} ranks are no groups of {tp}"
    groups = [range(start, start + tp) for start in range(0, world_size, tp)]
    domains: list[set[int]] = []
    for part in (*replicas, *groups):
        touched = [domain for domain in domains if not domain.isdisjoint(part)]
        apart = [domain for domain in domains if domain.isdisjoint(part)]
        domains = [*apart, set(part).union(*touched)]
    return sorted(sorted(domain) for domain in domains)


def deal(lengths: Sequence[int], num_engines: int) -> list[int]:
    """The engine of each request: longest first, there and back over the engines. Deterministic.

    Engines get equal counts, up to one, and each gets long and short requests.

    Args:
        lengths: tokens of each request's prompt.
        num_engines: how many share them.
    """
    engine_of = [0] * len(lengths)
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    for number, request in enumerate(longest_first):
        turn, place = divmod(number, num_engines)
        engine_of[request] = place if turn % 2 == 0 else num_engines - 1 - place
    return engine_of
