"""Low-rank adapters (Hu 2021, LoRA, arXiv 2106.09685, eq. 3): y = W x + alpha / r * B A x.

W is frozen; A [r, in] and B [out, r] are trained. B starts at 0, so that a new adapter changes
nothing. An adapter hangs below Megatron's linear layer as a submodule named `lora` and adds its
part to the layer's output, so that the layer's own names, files and kernels stay as they are.

Under tensor parallelism an adapter is cut as its layer is. Of a layer that is split by outputs
(linear_qkv, linear_fc1) each rank has all of A and its rows of B; of one that is split by inputs
(linear_proj, linear_fc2) its columns of A and all of B. What is exchanged is [tokens, r], never
[tokens, in]. Queries, keys and values share one A, as Megatron has them in one product; so do gate
and up. Left out: adapters on embeddings, experts and latent attention.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megappo.config.lora import LoraSection
from megappo.errors import ModelError
from megappo.models.spec import ModelSpec

CHILD = "lora"
_SPLIT_BY_OUTPUTS = ("linear_qkv", "linear_fc1")
_OF_THE_MLP = ("linear_fc1", "linear_fc2")


class Adapter(torch.nn.Module):  # type: ignore[misc]
    """A and B of one linear layer on this rank.

    Args:
        linear: Megatron's layer, its weight loaded.
        settings: rank, alpha and dropout.
        by_outputs: whether TP splits the layer's outputs, or else its inputs.
        seed: of A, which is drawn whole on every rank and cut, so that it is free of the layout.

    Raises:
        ModelError: the layer has another norm in it than RMSNorm.
    """

    def __init__(
        self, linear: torch.nn.Module, settings: LoraSection, *, by_outputs: bool, seed: int
    ) -> None:
        super().__init__()
        from megatron.core import parallel_state as ps

        if _has_norm(linear):
            _require_plain_rms_norm(linear.config)
        weight, config = linear.weight, linear.config
        rows, columns = weight.shape
        tp, rank = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()
        self.by_outputs = by_outputs
        self.scale = settings.alpha / settings.rank
        self.is_on = True
        self.dropout = settings.dropout
        self.drops = False
        """Whether dropout is in force: in the passes of an update alone."""
        self._sequence_parallel = config.sequence_parallel
        # Of a layer with the norm in it (Transformer Engine) the norm's input is all that one gets.
        self._norm = (lambda: linear.layer_norm_weight) if _has_norm(linear) else None
        self._eps = config.layernorm_epsilon
        whole = _draw(settings.rank, columns if by_outputs else columns * tp, seed)
        a = whole if by_outputs else whole.chunk(tp, dim=1)[rank]
        self.a = torch.nn.Parameter(a.to(device=weight.device, dtype=weight.dtype).contiguous())
        self.b = torch.nn.Parameter(weight.new_zeros(rows, settings.rank))
        _mark(self.a, split_dim=None if by_outputs else 1, sequence=self._sequence_parallel)
        _mark(self.b, split_dim=0 if by_outputs else None, sequence=self._sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """The adapter's part of the layer's output; see Megatron's linear layers for the shapes."""
        if self._norm is not None:
            x = F.rms_norm(x, x.shape[-1:], self._norm(), self._eps)
        if self.drops and self.dropout:
            x = self._drop(x)
        return F.linear(self._exchange(F.linear(x, self.a)), self.b) * self.scale

    def _exchange(self, hidden: Tensor) -> Tensor:
        """[tokens, r] between the halves; TP's ranks have then what B's part needs."""
        from megatron.core.tensor_parallel import mappings

        if self.by_outputs and self._sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(hidden)
        if self.by_outputs:
            return mappings.copy_to_tensor_model_parallel_region(hidden)
        if self._sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(hidden)
        return mappings.reduce_from_tensor_model_parallel_region(hidden)

    def _drop(self, x: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        if self.by_outputs and not self._sequence_parallel:
            return F.dropout(x, self.dropout)  # the same x on all TP ranks, so the same mask
        with get_cuda_rng_tracker().fork():
            return F.dropout(x, self.dropout)

    def merged(self, weight: Tensor) -> Tensor:
        """W + alpha / r * B A of this rank's shard, in the weight's own type. No communication."""
        product = self.b.detach().float() @ self.a.detach().float()
        return (weight.float() + self.scale * product).to(weight.dtype)


def check_targets(spec: ModelSpec, settings: LoraSection, *, key: str) -> None:
    """Refuses models that have no place for the adapters.

    Raises:
        ModelError: with the field and what to set.
    """
    if not settings.rank:
        return
    if spec.latent is not None:
        raise ModelError(
            f"{key}.rank is {settings.rank}: adapters for latent attention ({spec.model_type}) "
            f"are not built; set {key}.rank=0"
        )
    in_mlp = [name for name in settings.target_modules if name in _OF_THE_MLP]
    if spec.num_experts and in_mlp:
        raise ModelError(
            f"{key}.target_modules has {', '.join(in_mlp)}: experts ({spec.model_type}) get no "
            f"adapters; set {key}.target_modules=[linear_qkv,linear_proj]"
        )


def add_adapters(chunks: Sequence[torch.nn.Module], settings: LoraSection, *, seed: int) -> None:
    """Freezes this rank's chunks and gives the named layers adapters. No communication.

    A value head stays trained: it is new.

    Args:
        chunks: bare, weights loaded.
        settings: with a rank over 0.
        seed: of the adapters' first halves.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(_is_value_head(chunk, name))
        for layer in chunk.decoder.layers:
            for name in settings.target_modules:
                linear = getattr(layer.mlp if name in _OF_THE_MLP else layer.self_attention, name)
                _attach(linear, name, layer.layer_number, settings, seed)
        if chunk.pre_process and chunk.config.recompute_granularity is not None:
            # What is computed again gets gradients only if an input of it asks for one.
            chunk.embedding.register_forward_hook(_ask_for_gradient)


def _attach(linear: Any, name: str, layer_number: int, settings: LoraSection, seed: int) -> None:
    by_outputs = name in _SPLIT_BY_OUTPUTS
    own_seed = zlib.crc32(f"{seed} {layer_number} {name}".encode())
    linear.add_module(CHILD, Adapter(linear, settings, by_outputs=by_outputs, seed=own_seed))
    linear.register_forward_hook(_add_part)
    linear.sharded_state_dict = partial(_sharded_state, linear, name == "linear_fc1")


def _add_part(linear: Any, inputs: tuple[Any, ...], outputs: Any) -> Any:
    adapter = linear.lora
    if not adapter.is_on:
        return outputs
    output, bias = outputs
    return output + adapter(inputs[0]), bias


def _ask_for_gradient(embedding: Any, inputs: Any, output: Tensor) -> Tensor:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)
    return output


def _sharded_state(
    linear: Any,
    is_gated: bool,
    prefix: str = "",
    sharded_offsets: Any = (),
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A linear layer's part of a checkpoint, with its adapter cut as it really is."""
    from megatron.core import parallel_state as ps
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    assert metadata is not None
    below = f"{prefix}{CHILD}."
    found = type(linear).sharded_state_dict(linear, prefix, sharded_offsets, metadata)
    found = {key: value for key, value in found.items() if not key.startswith(below)}
    adapter: Adapter = linear.lora
    own = make_sharded_tensors_for_checkpoint(
        {"a": adapter.a, "b": adapter.b},
        below,
        {"b": 0} if adapter.by_outputs else {"a": 1},
        sharded_offsets,
        tp_group=ps.get_tensor_model_parallel_group(),
        dp_cp_group=metadata["dp_cp_group"],
    )
    if is_gated:  # rows of gate and up, which TP splits separately
        own[f"{below}b"] = apply_swiglu_sharded_factory(
            own[f"{below}b"], sharded_offsets, metadata.get("singleton_local_shards", False)
        )
    return {**found, **own}


def adapters(module: torch.nn.Module) -> Iterator[tuple[str, Adapter]]:
    """Each adapter below a module, with its layer's name there."""
    for name, child in module.named_modules():
        if isinstance(child, Adapter):
            yield name.removesuffix(f".{CHILD}"), child


@contextmanager
def without_adapters(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within the block the model is the one that it started from."""
    with _setting(chunks, "is_on", False):
        yield


@contextmanager
def dropping(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within the block the adapters drop inputs, if they have a dropout."""
    with _setting(chunks, "drops", True):
        yield


@contextmanager
def _setting(chunks: Sequence[torch.nn.Module], name: str, value: bool) -> Iterator[None]:
    found = [adapter for chunk in chunks for _, adapter in adapters(chunk)]
    for adapter in found:
        setattr(adapter, name, value)
    try:
        yield
    finally:
        for adapter in found:
            setattr(adapter, name, not value)


def is_adapter_name(name: str) -> bool:
    """Whether a parameter within a chunk belongs to an adapter."""
    return f".{CHILD}." in name


def _is_value_head(chunk: Any, name: str) -> bool:
    from megappo.models.value_head import ValueHead

    return name.startswith("output_layer.") and isinstance(chunk.output_layer, ValueHead)


def _has_norm(linear: torch.nn.Module) -> bool:
    return any(name == "layer_norm_weight" for name, _ in linear.named_parameters(recurse=False))


def _require_plain_rms_norm(config: Any) -> None:
    """An adapter repeats the norm that stands in its layer, and knows this one alone.

    Raises:
        ModelError: it is another one.
    """
    zero_centered = config.layernorm_zero_centered_gamma
    if config.normalization != "RMSNorm" or zero_centered:
        raise ModelError(
            "lora.rank is over 0: the layers have their norm in them, and adapters know "
            f"RMSNorm alone, not normalization {config.normalization} with "
            f"layernorm_zero_centered_gamma={zero_centered}; set lora.rank=0"
        )


def _draw(rank: int, columns: int, seed: int) -> Tensor:
    """[rank, columns] float32, uniform within 1 / sqrt(columns), as in the PEFT library."""
    generator = torch.Generator().manual_seed(seed)
    bound = columns**-0.5
    return (torch.rand(rank, columns, generator=generator) * 2 - 1) * bound


def _mark(parameter: Tensor, *, split_dim: int | None, sequence: bool) -> None:
    """Says how TP has it: a shard, or a copy whose gradient is a part of the sequence's alone."""
    from megatron.core.tensor_parallel import layers

    if split_dim is not None:
        layers.set_tensor_model_parallel_attributes(parameter, True, split_dim, 1)
    else:
        parameter.sequence_parallel = sequence
