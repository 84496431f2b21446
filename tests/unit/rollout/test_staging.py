"""Packing of weights into shared memory: bytes, places, and what is refused."""

import pytest
import torch

from megappo.rollout.staging import _PIECE_BYTES, Staging, pack, padded

CPU = torch.device("cpu")


def buffer_for(bucket) -> torch.Tensor:
    return torch.empty(sum(padded(x.nbytes) for _, x in bucket), dtype=torch.uint8)


def unpacked(bucket, buffer: torch.Tensor, spans) -> list[torch.Tensor]:
    return [
        buffer[start:end].view(x.dtype).view(x.shape)
        for (_, x), (start, end) in zip(bucket, spans, strict=True)
    ]


def test_tensors_of_any_dtype_shape_and_stride_arrive_bit_by_bit():
    torch.manual_seed(0)
    bucket = [
        ("scalar", torch.tensor(3.5)),
        ("odd", torch.randn(7).bfloat16()),
        ("transposed", torch.randn(5, 3).T),
        ("row", torch.randn(4, 6)[1]),
        ("column", torch.randn(4, 6)[:, 2]),
        ("counts", torch.arange(5)),
        ("empty", torch.zeros(0, 3)),
        ("half", torch.randn(3, 3).half()),
    ]
    buffer = buffer_for(bucket)
    spans = pack(bucket, buffer)
    for (name, sent), got in zip(bucket, unpacked(bucket, buffer, spans), strict=True):
        assert torch.equal(got, sent), name
    assert all(start % 16 == 0 for start, _ in spans)
    assert spans[:2] == [(0, 4), (16, 30)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_tensor_of_several_pieces_arrives_whole(dtype, more):
    count = 3 * _PIECE_BYTES // dtype.itemsize + more
    x = torch.arange(count).remainder(251).to(dtype)
    buffer = buffer_for([("x", x)])
    assert pack([("x", x)], buffer) == [(0, x.nbytes)]
    assert torch.equal(buffer[: x.nbytes].view(dtype), x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, _PIECE_BYTES // 4 - 1, _PIECE_BYTES // 4, -1])
def test_an_element_that_is_not_finite_is_found_in_every_piece(bad, place):
    x = torch.zeros(2 * _PIECE_BYTES // 4 + 5)
    x[place] = bad
    bucket = [("good", torch.ones(3)), ("bad", x)]
    with pytest.raises(ValueError, match=rf"'bad' has 1 of {len(x)} elements that are NaN"):
        pack(bucket, buffer_for(bucket))


def test_infinities_of_both_signs_are_found():
    x = torch.zeros(2, 3)
    x[0, 0], x[1, 2] = float("inf"), -float("inf")
    with pytest.raises(ValueError, match="'x' has 2 of 6"):
        pack([("x", x.T)], buffer_for([("x", x)]))


def test_finite_elements_may_sum_to_infinity():
    bucket = [("large", torch.full((64,), 3e38)), ("half", torch.full((64,), 6e4).half())]
    buffer = buffer_for(bucket)
    spans = pack(bucket, buffer)
    for (_, sent), got in zip(bucket, unpacked(bucket, buffer, spans), strict=True):
        assert torch.equal(got, sent)


def test_two_buckets_in_a_row_have_different_memory_and_the_third_has_the_first_ones():
    staging = Staging()
    first, second, third = (staging.slot(n).at_least(100, device=CPU).data_ptr() for n in range(3))
    assert first == third != second


def test_a_slot_grows_for_a_larger_bucket_and_must_be_mapped_anew():
    slot = Staging().slot(0)
    small = slot.at_least(100, device=CPU)
    assert small.is_shared()
    slot.mapped = True
    assert slot.at_least(60, device=CPU) is small
    assert slot.mapped
    assert slot.at_least(101, device=CPU).nbytes == 101
    assert not slot.mapped


def test_host_memory_stays_after_a_push():
    staging = Staging()
    buffer = staging.slot(1).at_least(10, device=CPU)
    staging.end_push()
    assert staging.slot(1).buffer is buffer
