"""Fills Megatron chunks from a Hugging Face folder, and names what they hold.

Loading talks to no other rank: each reads its slices of the files. The table of names, which
`hf_export` uses for the way back, is in `name_map`. Loading comes before Megatron's FSDP wraps.

An expert is held by one EP rank of its stage and split over the expert-TP ranks (ETP), which need
not be as many as the TP ranks. EP divides the TP x CP x DP ranks of a stage, so it reaches across
replicas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from torch import Tensor

from megappo.distributed.fsdp import ShardedParameter, is_sharded, sharded_parameters
from megappo.errors import ModelError
from megappo.models.hf_folder import TensorFolder, TensorReader
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

__all__ = ["hf_names", "load_hf_weights"]

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
