"""Ranks of several nodes agree over a real TCPStore; here each rank is a thread."""

import datetime
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist

from megappo.distributed import node_agreement
from megappo.distributed.environment import LaunchEnvironment
from megappo.distributed.node_agreement import NodeAgreement
from megappo.distributed.node_facts import NodeFacts
from megappo.errors import NodesMissingError, UserError


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def place(rank):
    """Two nodes of two ranks."""
    return LaunchEnvironment(
        rank=rank, world_size=4, local_rank=rank % 2, local_world_size=2, num_nodes=2,
        node=rank // 2,
    )  # fmt: skip


def all_ranks(server, function, ranks=range(4)):
    """function(launch, store) on a thread a rank; the value or the error of each."""

    def one(rank):
        store = dist.TCPStore(
            "127.0.0.1", server.port, timeout=datetime.timedelta(seconds=20), wait_for_workers=False
        )
        try:
            return function(place(rank), store)
        except (UserError, NodesMissingError, OSError) as error:
            return error

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, ranks))


def find(launch, store, wait_s=10.0):
    main = launch.rank == 0
    function = node_agreement._find_others if main else node_agreement._find_main
    return function(launch, store, wait_s)


def agreement(launch, store):
    return NodeAgreement(launch, dist.PrefixStore(find(launch, store), store), f"h{launch.node}")


def test_each_start_finds_a_name_of_its_own_in_the_store_of_the_last(server):
    first = all_ranks(server, find)
    second = all_ranks(server, find)
    assert len(set(first)) == len(set(second)) == 1
    assert first[0].startswith("start-")
    assert first[0] != second[0]


def test_a_rank_that_did_not_come_is_named(server):
    all_ranks(server, find)  # leaves the numbers of ranks that are gone
    found = all_ranks(server, lambda *a: find(*a, wait_s=1.0), ranks=[1, 2, 3])
    assert all(isinstance(error, NodesMissingError) for error in found)
    assert "for rank 0 at localhost: it ended or did not start" in str(found[0])


def test_rank_0_names_the_ranks_that_did_not_come(server):
    found = all_ranks(server, lambda *a: find(*a, wait_s=4.0), ranks=[0, 1])
    assert "2 of 4 ranks did not come within 4 s (trainer.node_wait_s): [2, 3]" in str(found[0])


def facts(launch, **settings):
    common = {"torch": "2", "megatron-core": "0.16", "sglang": "0.5", **settings}
    return NodeFacts(node=launch.node, host=f"h{launch.node}", address="a", settings=common)


def test_nodes_that_are_alike_go_on(server):
    found = all_ranks(server, lambda *a: agreement(*a).compare(facts(a[0]), wait_s=10))
    assert len(set(found)) == 1
    assert found[0].startswith("2, alike: config and versions")


def test_the_restarts_of_the_node_that_counts_most_are_taken(server):
    def restarts(launch, store):
        launch = replace(launch, restarts=3 * launch.node)
        met = agreement(launch, store)
        met.compare(facts(launch), wait_s=10)
        return met.restarts()

    assert all_ranks(server, restarts)[0] == 3


def test_all_ranks_learn_which_node_is_odd(server):
    found = all_ranks(
        server,
        lambda launch, store: agreement(launch, store).compare(
            facts(launch, lr=str(launch.node)), wait_s=10
        ),
    )
    assert all(isinstance(error, UserError) for error in found)
    assert len({str(error) for error in found}) == 1
    assert "  lr: node 1 (h1, a) has 1; node 0 (h0, a) has 0" in str(found[0])


def check(launch, store):
    with agreement(launch, store).all_or_none(wait_s=10):
        if launch.rank == 3:
            raise UserError("data.train_files: no such file")
    return "passed"


def test_checks_that_fail_on_one_node_end_all(server):
    found = all_ranks(server, check)
    assert [type(f) for f in found] == [UserError] * 4
    assert str(found[3]) == "data.train_files: no such file"
    assert {str(f) for f in found[:3]} == {"rank 3 (h1): data.train_files: no such file"}


def test_checks_that_pass_everywhere_go_on(server):
    def passing(launch, store):
        with agreement(launch, store).all_or_none(wait_s=10):
            pass
        return "passed"

    assert all_ranks(server, passing) == ["passed"] * 4
