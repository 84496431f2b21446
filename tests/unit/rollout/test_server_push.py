"""Buckets for a server, and a group that nobody joins."""

import time

import pytest
import torch

from megappo.distributed.update_group import UpdateGroup, UpdateGroupFailed, address_towards
from megappo.rollout.server_push import buckets, pack


def named(*shapes_and_dtypes):
    return [
        (str(i), torch.full(shape, i, dtype=dtype))
        for i, (shape, dtype) in enumerate(shapes_and_dtypes)
    ]


def test_buckets_keep_order_size_and_one_dtype():
    half, single = torch.bfloat16, torch.float32
    tensors = named(((2,), half), ((3,), half), ((1,), single), ((9,), single), ((1,), half))
    names = [[name for name, _ in bucket] for bucket in buckets(tensors, 16)]
    assert names == [["0", "1"], ["2"], ["3"], ["4"]]
    assert [len(bucket) for bucket in buckets(tensors, 1 << 20)] == [2, 2, 1]
    assert list(buckets([], 16)) == []


def test_a_packed_bucket_is_its_tensors_end_to_end():
    tensors = [("a", torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T), ("b", torch.tensor([5.0]))]
    packed = pack(tensors, torch.full((64,), 7, dtype=torch.uint8))
    assert packed.dtype == torch.uint8
    assert packed.view(torch.float32).tolist() == [1.0, 3.0, 2.0, 4.0, 5.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_tensor_that_is_not_finite_is_named_and_not_packed(value):
    tensors = [("a", torch.ones(3)), ("b", torch.tensor([1.0, value]))]
    with pytest.raises(ValueError, match=r"weight 'b' has 1 of 2 elements"):
        pack(tensors, torch.empty(64, dtype=torch.uint8))


def test_a_sum_that_overflows_is_no_fault():
    largest = torch.finfo(torch.bfloat16).max
    packed = pack(
        [("a", torch.full((4,), largest, dtype=torch.bfloat16))], torch.empty(8, dtype=torch.uint8)
    )
    assert packed.view(torch.bfloat16).tolist() == [largest] * 4


def test_a_group_that_the_engine_gives_up_fails_at_once():
    group = UpdateGroup("g", address="127.0.0.1", num_receivers=1, backend="gloo", timeout_s=60)
    start = time.monotonic()
    with pytest.raises(UpdateGroupFailed, match=f"reached 127.0.0.1:{group.port}"):
        group.join(arrival_timeout_s=60, given_up=lambda: True)
    assert time.monotonic() - start < 30
    group.close()


def test_an_address_that_is_not_this_hosts_is_refused():
    with pytest.raises(UpdateGroupFailed, match=r"cannot listen on 203\.0\.113\.7"):
        UpdateGroup("g", address="203.0.113.7", num_receivers=1, backend="gloo", timeout_s=60)


def test_the_way_to_loopback_is_loopback():
    assert address_towards("127.0.0.1", 30000) == "127.0.0.1"
    assert address_towards("localhost", 30000) in ("127.0.0.1", "::1")
