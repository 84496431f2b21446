"""Yields a model's weights as complete Hugging Face tensors, and writes them as a folder.

Collective over TP, PP and EP, one full tensor at a time; exact: a folder that is loaded
(`models.weights`) and saved has equal bytes in every tensor. Under Megatron's FSDP a weight is
spread over DP, and exporting is collective over DP too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.distributed.fsdp import ShardedParameter, is_managed
from megappo.distributed.offload import OffloadedError
from megappo.errors import ModelError
from megappo.models.hf_folder import write_folder
from megappo.models.name_map import OUTPUT_LAYER, Entry, Head, tensor_map
from megappo.models.spec import ModelSpec
from megappo.models.weights import named_adapters, named_weights


def _split_qkv(rows: Tensor, spec: ModelSpec) -> list[Tensor]:
    """Undoes `_merge_qkv` for the full tensor."""
    grouped = rows.reshape(spec.num_kv_heads, -1, *rows.shape[1:])
    queries = spec.num_heads // spec.num_kv_heads * spec.head_dim
    parts = grouped.split([queries, spec.head_dim, spec.head_dim], dim=1)
    return [part.flatten(0, 1) for part in parts]


def export_hf(
    chunks: Sequence[torch.nn.Module],
    spec: ModelSpec,
    *,
    head: Head = "lm",
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields every Hugging Face tensor of the model, complete, on every rank, one at a time.

    Collective over the TP and PP groups, for a model with experts over the EP and ETP groups too,
    which reach across replicas, and under Megatron's FSDP over DP: all of their ranks must take
    every item. Adapters are merged into the weights that they add to. A tensor may share memory
    with a parameter; copy what is kept beyond the next item.

    Args:
        chunks: This rank's chunks, bare or wrapped; those that Megatron's FSDP wraps, wrapped.
        spec: The architecture.
        head: What the chunks were built with.
        dtype: Of the tensors, None for that of the parameters.

    Yields:
        Name and tensor, in the order of the layers.

    Raises:
        OffloadedError: a weight has no memory on the device.
    """
    mine = {name: _readable(name, p) for name, p in named_weights(chunks, spec)}
    table = tensor_map(spec, head)
    if head == "lm" and spec.tied:
        # The last stage of a pipeline has a copy of the embedding under this name.
        mine.pop(OUTPUT_LAYER, None)
        del table[OUTPUT_LAYER]
    adapted = named_adapters(chunks, spec)
    owners = find_owners(mine, spread=spec.num_experts > 0)
    unowned, unmapped = table.keys() - owners.keys(), owners.keys() - table.keys()
    assert not unowned, f"no rank holds {sorted(unowned)}"
    assert not unmapped, f"these have no Hugging Face name: {sorted(unmapped)}"
    for name, entry in table.items():
        held = mine.get(name)
        if name in adapted:
            assert isinstance(held, Tensor), "fully sharded models have no adapters"
            held = adapted[name].merged(held)
        full = gather_full(held, owners[name], entry)
        parts = split_full(full, entry, spec)
        for (hf_name, _), part in zip(entry.parts, parts, strict=True):
            kept = part.dtype if dtype is None or entry.is_buffer else dtype
            yield hf_name, part.to(kept).contiguous()


def _readable(name: str, parameter: Tensor | ShardedParameter) -> Tensor | ShardedParameter:
    if isinstance(parameter, ShardedParameter):
        return parameter
    assert not is_managed(parameter), f"{name} is sharded: export the wrapper, not the bare chunk"
    if parameter.numel() and not parameter.untyped_storage().nbytes():
        raise OffloadedError(
            f"{name} {list(parameter.shape)} has no memory on the device: "
            'memory.load("params"), or memory.on_device("params"), must come before an export'
        )
    return parameter.detach()


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Where a parameter is, and what its TP or ETP shard looks like."""

    stage: int
    ep_rank: int
    """Of an expert; a rank among several that have any other parameter."""
    shape: torch.Size
    dtype: torch.dtype
    device: str


def find_owners(mine: Mapping[str, Tensor | ShardedParameter], *, spread: bool) -> dict[str, Owner]:
    """Who holds each parameter. Collective over the PP group, and over the EP group if `spread`."""
    from megatron.core import parallel_state as ps

    stage, ep_rank = ps.get_pipeline_model_parallel_rank(), ps.get_expert_model_parallel_rank()
    owners = {
        name: Owner(
            stage=stage, ep_rank=ep_rank, shape=t.shape, dtype=t.dtype, device=t.device.type
        )
        for name, t in mine.items()
    }
    groups = [ps.get_pipeline_model_parallel_group()]
    if spread:
        groups.append(ps.get_expert_model_parallel_group())
    for group in groups:
        gathered: list[dict[str, Owner]] = [{}] * group.size()
        dist.all_gather_object(gathered, owners, group=group)
        owners = {name: owner for held in gathered for name, owner in held.items()}
    return owners


def gather_full(held: Tensor | ShardedParameter | None, owner: Owner, entry: Entry) -> Tensor:
    """The full Megatron tensor on every rank. Collective over the PP and TP, or EP, PP and ETP.

    One of Megatron's FSDP is gathered over DP first.
    """
    from megatron.core import parallel_state as ps

    if held is None:
        shard = torch.empty(owner.shape, dtype=owner.dtype, device=owner.device)
    else:
        shard = held.gather() if isinstance(held, ShardedParameter) else held
    pp_group, tp_group = (
        ps.get_pipeline_model_parallel_group(),
        ps.get_tensor_model_parallel_group(),
    )
    if entry.is_expert:
        tp_group = ps.get_expert_tensor_parallel_group()
        ep_group = ps.get_expert_model_parallel_group()
        # The ranks of an EP group are of one stage, so they all take the branch or none does.
        if ep_group.size() > 1 and ps.get_pipeline_model_parallel_rank() == owner.stage:
            dist.broadcast(shard, dist.get_global_rank(ep_group, owner.ep_rank), group=ep_group)
    if pp_group.size() > 1:
        dist.broadcast(shard, dist.get_global_rank(pp_group, owner.stage), group=pp_group)
    if entry.tp_dim is None or tp_group.size() == 1:
        return shard
    shards = [torch.empty_like(shard) for _ in range(tp_group.size())]
    dist.all_gather(shards, shard.contiguous(), group=tp_group)
    if entry.kind != "gate_up":
        return torch.cat(shards, dim=entry.tp_dim)
    halves = [half for shard in shards for half in shard.chunk(2)]
    return torch.cat(halves[::2] + halves[1::2])


def split_full(full: Tensor, entry: Entry, spec: ModelSpec) -> list[Tensor]:
    """The Hugging Face tensors of one complete parameter, in the order of `entry.parts`."""
    if entry.kind == "qkv":
        return _split_qkv(full, spec)
    if entry.kind == "gate_up":
        return list(full.chunk(2))
    return [full[: spec.vocab_size] if entry.kind == "vocab" else full]


def save_hf(
    chunks: Sequence[torch.nn.Module],
    spec: ModelSpec,
    source_folder: str | Path,
    out: str | Path,
    *,
    head: Head = "lm",
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a complete Hugging Face folder; global rank 0 writes, and all return when it is there.

    Collective over all ranks.

    Args:
        chunks: This rank's chunks.
        spec: The architecture.
        source_folder: Where the model came from: its tokenizer and other side files are copied.
        out: Folder to make; must not exist.
        head: What the chunks were built with.
        dtype: Of the written tensors, None for that of the parameters.
        max_shard_bytes: Largest size of a weights file.

    Raises:
        ModelError: `out` exists.
    """
    # All ranks must raise, or those that do not would wait for rank 0 in the export.
    exists = [dist.get_rank() == 0 and Path(out).exists()]
    dist.broadcast_object_list(exists, src=0)
    if exists[0]:
        raise ModelError(f"{out} exists; choose a folder that does not, or move it away")
    tensors = export_hf(chunks, spec, head=head, dtype=dtype)
    if dist.get_rank() == 0:
        write_folder(tensors, source_folder, out, head=head, max_shard_bytes=max_shard_bytes)
    else:
        for _ in tensors:
            pass
    dist.barrier()
