"""The counter of tools/bench/ranks.py, on a group of one rank."""

from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tools.bench.ranks import COLLECTIVES, count_collectives


@pytest.fixture
def counts(monkeypatch):
    for name in COLLECTIVES:  # so that the wrappers are taken off afterwards
        for module in (dist, c10d):
            monkeypatch.setattr(module, name, getattr(module, name))
    found: dict[str, float] = defaultdict(float)
    count_collectives(found)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield found
    dist.destroy_process_group()


def test_bytes_handed_in_and_got_out_are_counted_once_a_call(counts):
    value = torch.ones(5, dtype=torch.float64)
    dist.all_reduce(value)
    assert counts["control/given"] == counts["control/taken"] == 40
    dist.all_gather([torch.empty(5, dtype=torch.float64)], value)
    dist.all_gather_into_tensor(output_tensor=torch.empty(3), input_tensor=torch.ones(3))
    assert counts["control/given"] == 40 + 40 + 12
    assert counts["control/calls"] == 3
    assert counts["buckets/calls"] == counts["inside"] == 0


def test_collectives_of_objects_are_counted_too(counts):
    dist.all_gather_object([None], "x" * 1000)
    assert counts["control/calls"] == 2  # sizes, then bytes
    assert counts["control/given"] > 1000


def test_calls_from_megatrons_buckets_are_told_apart(counts):
    source = "def sync(dist, out, value):\n    dist.reduce_scatter_tensor(out, value)\n"
    names: dict[str, object] = {}
    exec(compile(source, "/x/megatron/core/distributed/param_and_grad_buffer.py", "exec"), names)
    names["sync"](dist, torch.empty(4), torch.ones(4))
    assert counts["buckets/given"] == counts["buckets/taken"] == 16
    assert counts["control/calls"] == 0
