"""Tensors from any rank of a gloo group to any other, each sent only where it is needed.

`exchange` is an all-to-all of uneven parts: sizes first, then one buffer of integers and one of
floats. A rank receives what is addressed to it and nothing else; no rank ever holds what all of
them sent. `exchange_objects` does the same with Python objects, for requests and responses.
`gather_equal` is for small control data that every rank needs, such as lengths.

Left out: other dtypes and devices. Callers say how their fields map to the two buffers.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """What one rank sends to another; both parts may be empty."""

    integers: Tensor
    """[i] int64, on the CPU"""
    floats: Tensor
    """[f] float32, on the CPU"""


def exchange(outgoing: Sequence[Parcel], group: Any) -> list[Parcel]:
    """Sends a parcel to every rank and returns those addressed to this one.

    Collective over `group` (gloo).

    Args:
        outgoing: one parcel for each rank, in group order; the own one is copied.
        group: ranks that take part.

    Returns:
        One parcel from each rank, in group order.
    """
    assert len(outgoing) == dist.get_world_size(group), "one parcel for each rank of the group"
    sizes = torch.tensor([[p.integers.numel(), p.floats.numel()] for p in outgoing])
    incoming = torch.empty_like(sizes)
    dist.all_to_all_single(incoming, sizes, group=group)
    integers = _all_to_all([p.integers for p in outgoing], incoming[:, 0].tolist(), group)
    floats = _all_to_all([p.floats for p in outgoing], incoming[:, 1].tolist(), group)
    return [Parcel(integers=i, floats=f) for i, f in zip(integers, floats, strict=True)]


def exchange_objects(outgoing: Sequence[Any], group: Any) -> list[Any]:
    """Sends an object to every rank and returns those addressed to this one.

    Collective over `group` (gloo). Objects are pickled, as torch does for `all_gather_object`.

    Args:
        outgoing: one object for each rank, in group order.
        group: ranks that take part.

    Returns:
        One object from each rank, in group order.
    """
    assert len(outgoing) == dist.get_world_size(group), "one object for each rank of the group"
    packed = [torch.frombuffer(bytearray(pickle.dumps(o)), dtype=torch.uint8) for o in outgoing]
    sizes = torch.tensor([part.numel() for part in packed])
    incoming = torch.empty_like(sizes)
    dist.all_to_all_single(incoming, sizes, group=group)
    received = _all_to_all(packed, incoming.tolist(), group)
    return [pickle.loads(part.numpy().tobytes()) for part in received]


def gather_equal(values: Tensor, group: Any) -> Tensor:
    """Every rank's tensor, stacked in group order: [ranks, *values.shape].

    Collective over `group` (gloo). All ranks must give the same shape and dtype.
    """
    gathered = values.new_empty(dist.get_world_size(group), *values.shape)
    dist.all_gather_into_tensor(gathered.flatten(0, 1), values.contiguous(), group=group)
    return gathered


def _all_to_all(parts: Sequence[Tensor], sizes: list[int], group: Any) -> list[Tensor]:
    """Parts of `sizes` elements from each rank; views of one buffer."""
    sent = torch.cat(list(parts))
    received = sent.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent, sizes, [part.numel() for part in parts], group=group)
    return list(received.split(sizes))
