"""Who owns an engine, who shares prompts, and who gets which request."""

import random

import pytest

from megappo.distributed.parallel import replicas
from megappo.rollout.placement import Placement, deal, sharing_domains

LAYOUTS = [(1, 1, 4, 1), (2, 1, 2, 1), (1, 2, 2, 1), (1, 1, 2, 2), (2, 1, 2, 2), (2, 2, 2, 2)]


def test_replicas_of_megatrons_order_are_these():
    assert replicas(tp=2, cp=1, dp=2, pp=2) == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize(
    ("layout", "tp", "domains"),
    [
        ((1, 1, 4, 1), 1, [[0], [1], [2], [3]]),
        ((1, 1, 4, 1), 2, [[0, 1], [2, 3]]),  # one engine for two replicas
        ((2, 1, 2, 1), 1, [[0, 1], [2, 3]]),  # two engines for one replica
        ((2, 1, 2, 1), 2, [[0, 1], [2, 3]]),
        ((2, 1, 2, 1), 4, [[0, 1, 2, 3]]),
        ((1, 1, 2, 2), 1, [[0, 2], [1, 3]]),  # stages of a replica are two ranks apart
        ((1, 1, 2, 2), 2, [[0, 1, 2, 3]]),  # so each engine serves both replicas
    ],
)
def test_domains_by_hand(layout, tp, domains):
    t, cp, dp, pp = layout
    assert sharing_domains(replicas(tp=t, cp=cp, dp=dp, pp=pp), tp) == domains


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_domain_holds_whole_replicas_and_whole_engines(layout, tp):
    t, cp, dp, pp = layout
    parts = replicas(tp=t, cp=cp, dp=dp, pp=pp)
    domains = sharing_domains(parts, tp)
    world = t * cp * dp * pp
    assert sorted(rank for domain in domains for rank in domain) == list(range(world))
    for part in (*parts, *(range(i, i + tp) for i in range(0, world, tp))):
        assert sum(not set(part).isdisjoint(domain) for domain in domains) == 1


def test_the_first_rank_of_each_group_owns_its_engine():
    place = Placement(
        rank=6, owner_ranks=frozenset({0, 2, 4, 6}), members=(1, 4, 5, 6, 7), group=None
    )
    assert place.owns_engine
    assert place.owners == [1, 3]


def test_requests_are_dealt_longest_first_there_and_back():
    assert deal([1, 9, 5, 5, 7, 3], 2) == [1, 0, 1, 0, 1, 0]
    assert deal([4, 4, 4], 1) == [0, 0, 0]
    assert deal([], 3) == []


def test_engines_get_equal_counts_and_near_equal_tokens():
    draw = random.Random(0)
    for _ in range(50):
        lengths = [draw.choice((20, 60, 400)) for _ in range(draw.randrange(1, 200))]
        engines = draw.randrange(1, 9)
        engine_of = deal(lengths, engines)
        counts = [engine_of.count(e) for e in range(engines)]
        tokens = [sum(n for n, o in zip(lengths, engine_of, strict=True) if o == e)
                  for e in range(engines)]  # fmt: skip
        assert max(counts) - min(counts) <= 1
        assert max(tokens) - min(tokens) <= max(lengths)
