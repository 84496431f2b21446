"""Fills Megatron chunks from a Hugging Face folder, and yields them as Hugging Face tensors again.

Loading talks to no other rank: each reads its slices of the files. Exporting is collective over TP,
PP and EP and holds one full tensor at a time. Both are exact: a folder that is loaded and saved has
equal bytes in every tensor. The table they share is in `name_map`. Under Megatron's FSDP a weight
is spread over DP, and exporting is collective over DP too; loading comes before that wrapper.

An expert is held by one EP rank of its stage and split over the expert-TP ranks (ETP), which need
not be as many as the TP ranks. EP divides the TP x CP x DP ranks of a stage, so it reaches across
replicas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from megappo.distributed.fsdp import ShardedParameter, is_managed, is_sharded, sharded_parameters
from megappo.distributed.offload import OffloadedError
from megappo.errors import ModelError
from megappo.models.hf_folder import TensorFolder, TensorReader, write_folder
from megappo.models.lora import Adapter, adapters, is_adapter_name
from megappo.models.name_map import (
    LM_HEAD,
    OUTPUT_LAYER,
    ROUTER_BIAS,
    VALUE_HEAD,
    Entry,
    Head,
    canonical_name,
    hf_names,
    tensor_map,
)
from megappo.models.spec import ModelSpec

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

__all__ = ["export_hf", "hf_names", "load_hf_weights", "save_hf"]

# Old Llama folders store RoPE frequencies, which follow from config.json.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def load_hf_weights(
    chunks: Sequence[torch.nn.Module],
    folder: str | Path,
    spec: ModelSpec,
    *,
    head: Head = "lm",
) -> None:
    """Fills every parameter of this rank's chunks, each from the slice that belongs to the rank.

    A value head is filled if the folder has `score.weight`, and keeps its initial weight if not.

    Args:
        chunks: From `build_chunk`, bare or wrapped by Megatron's DDP.
        folder: The Hugging Face folder.
        spec: Its architecture.
        head: What the chunks were built with.

    Raises:
        ModelError: the folder lacks tensors, has others that the model has no place for, or has
            one of another shape.
    """
    from megatron.core import parallel_state as ps

    dense = (ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank())
    expert = (ps.get_expert_tensor_parallel_world_size(), ps.get_expert_tensor_parallel_rank())
    with TensorFolder(folder) as tensors, torch.no_grad():
        expected = check_names(tensors, spec, head)
        table = tensor_map(spec, head)
        for name, parameter in named_weights(chunks, spec):
            assert isinstance(parameter, Tensor), "weights are loaded before they are sharded"
            entry = table[name]
            if head == "value" and name == OUTPUT_LAYER and VALUE_HEAD not in expected:
                continue
            tp, rank = expert if entry.is_expert else dense
            shard = read_shard(tensors, entry, spec, tp, rank)
            assert shard.shape == parameter.shape, (name, shard.shape, parameter.shape)
            parameter.copy_(shard)


def check_weights(folder: str | Path, spec: ModelSpec, *, head: Head) -> None:
    """Opens the weight files and compares names and shapes, from the headers alone.

    Raises:
        ModelError: a file is damaged or no safetensors (a Git-LFS pointer, say); or `check_names`.
    """
    try:
        with TensorFolder(folder) as tensors:
            check_names(tensors, spec, head)
    except (SafetensorError, OSError, KeyError) as error:
        raise ModelError(
            f"the weights in {folder} cannot be read: {error}; download the folder again"
        ) from error


def check_names(tensors: TensorReader, spec: ModelSpec, head: Head) -> dict[str, tuple[int, ...]]:
    """Name and shape of the tensors that will be read; every other one must be known to be idle.

    Raises:
        ModelError: a tensor is missing, unknown, or of another shape than the model's.
    """
    found = {
        name
        for name in tensors.names()
        if not _DERIVED.fullmatch(name) and not _is_dropped(name, spec)
    }
    expected = hf_names(spec, head=head)
    if head == "value" and VALUE_HEAD not in found:
        del expected[VALUE_HEAD]
    # A critic may start from a language model, and a tied model may store its embedding twice.
    idle = {LM_HEAD} if head == "value" or spec.tied else set()
    missing, unknown = expected.keys() - found, found - expected.keys() - idle
    if missing or unknown:
        raise ModelError(
            f"the weights in {tensors.folder} do not fit a {spec.model_type} model with "
            f"{'a value head' if head == 'value' else 'a language-model head'}: "
            f"missing {listed(missing)}; unknown {listed(unknown)}"
        )
    for name, shape in expected.items():
        if tensors.shape(name) != shape:
            raise ModelError(
                f"{tensors.folder}: {name} has shape {list(tensors.shape(name))}, but this model "
                f"needs {list(shape)}"
            )
    return expected


def _is_dropped(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor belongs to a layer after the model's own (MTP), which is declared dropped.

    Only where config.json counts such layers: elsewhere it is an unknown tensor.
    """
    layer = _LAYER.match(name)
    return layer is not None and 0 <= int(layer[1]) - spec.num_layers < spec.dropped_layers


def dropped_names(tensors: TensorReader, spec: ModelSpec) -> set[str]:
    """Tensors of the folder's layers that are declared dropped (MTP)."""
    return {name for name in tensors.names() if _is_dropped(name, spec)}


def listed(names: set[str]) -> str:
    """The first few names and how many more there are."""
    shown = ", ".join(sorted(names)[:5]) or "none"
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown


def named_weights(
    chunks: Sequence[torch.nn.Module], spec: ModelSpec
) -> Iterator[tuple[str, Tensor | ShardedParameter]]:
    """Canonical name of each weight and router's bias on this rank, and it; each name once.

    Adapters have no such name: see `named_adapters`.
    """
    seen: set[str] = set()
    for chunk in chunks:
        naming = _naming(chunk, spec)
        for local, parameter in _local_parameters(chunk):
            if is_adapter_name(local):
                continue
            name = naming(local)
            assert name not in seen, f"two parameters of this rank are {name}"
            seen.add(name)
            yield name, parameter


def named_adapters(chunks: Sequence[torch.nn.Module], spec: ModelSpec) -> dict[str, Adapter]:
    """This rank's adapters by the canonical name of the weight that each adds to."""
    return {
        _naming(chunk, spec)(f"{layer}.weight"): adapter
        for chunk in chunks
        for layer, adapter in adapters(_unwrap(chunk))
    }


def _naming(chunk: torch.nn.Module, spec: ModelSpec) -> Callable[[str], str]:
    """From a name within a chunk to the canonical one."""
    from megatron.core import parallel_state as ps

    num_local_experts = spec.num_experts // ps.get_expert_model_parallel_world_size()
    layers = _unwrap(chunk).decoder.layers
    return partial(
        canonical_name,
        layer_offset=layers[0].layer_number - 1 if len(layers) else 0,
        expert_offset=num_local_experts * ps.get_expert_model_parallel_rank(),
        moe_layers=spec.moe_layers,
        latent=spec.latent is not None,
    )


def _local_parameters(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor | ShardedParameter]]:
    """Name within the bare chunk, and the parameter, or a router's bias."""
    if is_sharded(chunk):
        yield from ((parameter.name, parameter) for parameter in sharded_parameters(chunk))
    else:
        yield from _unwrap(chunk).named_parameters()
    yield from router_biases(chunk).items()


def router_biases(chunk: torch.nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to the model, by their names within the bare chunk."""
    buffers = _unwrap(chunk).named_buffers()
    return {name: buffer for name, buffer in buffers if name.endswith(f".{ROUTER_BIAS}")}


def _unwrap(chunk: torch.nn.Module) -> GPTModel:
    from megatron.core.distributed import DistributedDataParallel

    if is_sharded(chunk):
        return chunk.module.module
    return chunk.module if isinstance(chunk, DistributedDataParallel) else chunk


def read_shard(tensors: TensorReader, entry: Entry, spec: ModelSpec, tp: int, rank: int) -> Tensor:
    """Slice of one parameter that TP (or ETP) rank `rank` of `tp` holds."""
    if entry.kind == "vocab":
        return _read_vocab_rows(tensors, entry, tp, rank)
    pieces = []
    for name, shape in entry.parts:
        if entry.tp_dim is None:
            pieces.append(tensors.read(name))
        else:
            size = shape[entry.tp_dim] // tp
            pieces.append(
                tensors.read(name, dim=entry.tp_dim, start=rank * size, stop=(rank + 1) * size)
            )
    if entry.kind == "qkv":
        return _merge_qkv(pieces, spec.num_kv_heads // tp)
    return torch.cat(pieces) if entry.kind == "gate_up" else pieces[0]


def _read_vocab_rows(tensors: TensorReader, entry: Entry, tp: int, rank: int) -> Tensor:
    """Rows of the padded vocabulary; padding is 0 and stays so, since it gets no gradient."""
    ((name, (rows, columns)),) = entry.parts
    size = -(-rows // tp)
    real = tensors.read(name, start=min(rank * size, rows), stop=min((rank + 1) * size, rows))
    return torch.cat([real, real.new_zeros(size - len(real), columns)])


def _merge_qkv(parts: Sequence[Tensor], kv_heads: int) -> Tensor:
    """Stacks rows as Megatron does: for each key-value head its query heads, the key, the value."""
    grouped = [part.reshape(kv_heads, -1, *part.shape[1:]) for part in parts]
    return torch.cat(grouped, dim=1).flatten(0, 1)


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
