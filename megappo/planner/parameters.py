"""Parameters that one rank holds, tensor by tensor, as Megatron builds them.

Tensors are told apart by how their gradients are reduced: those of experts over the ranks that hold
the same experts (expert DP), all others over DP x CP. Each is rounded up to `PARAM_ALIGNMENT`
elements, as Megatron lays parameters into its buffers (param_and_grad_buffer.py:665).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megappo.models.build import chunk_layers, padded_vocab_size
from megappo.models.spec import ModelSpec
from megappo.planner.constants import PARAM_ALIGNMENT
from megappo.planner.flops import Head


@dataclass(frozen=True, kw_only=True)
class Elements:
    """Elements of some tensors on one rank."""

    dense: int = 0
    """Of tensors that are no routed expert's."""
    experts: int = 0
    aligned_dense: int = 0
    """As `dense`, each tensor rounded up."""
    aligned_experts: int = 0

    @property
    def total(self) -> int:
        """Without rounding."""
        return self.dense + self.experts

    def __add__(self, other: Elements) -> Elements:
        return Elements(
            dense=self.dense + other.dense,
            experts=self.experts + other.experts,
            aligned_dense=self.aligned_dense + other.aligned_dense,
            aligned_experts=self.aligned_experts + other.aligned_experts,
        )

    def __mul__(self, count: int) -> Elements:
        return Elements(
            dense=self.dense * count,
            experts=self.experts * count,
            aligned_dense=self.aligned_dense * count,
            aligned_experts=self.aligned_experts * count,
        )


def _elements(dense: Sequence[int], experts: Sequence[int] = ()) -> Elements:
    def aligned(sizes: Sequence[int]) -> int:
        return sum(-(-n // PARAM_ALIGNMENT) * PARAM_ALIGNMENT for n in sizes)

    return Elements(
        dense=sum(dense),
        experts=sum(experts),
        aligned_dense=aligned(dense),
        aligned_experts=aligned(experts),
    )


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Layers that stand together on one rank."""

    dense_layers: int
    moe_layers: int
    has_embedding: bool
    has_head: bool

    @property
    def num_layers(self) -> int:
        """Of both kinds."""
        return self.dense_layers + self.moe_layers


Stage = tuple[Chunk, ...]
"""All chunks of one pipeline rank: several under a virtual pipeline."""


@lru_cache(maxsize=4096)
def stages(
    spec: ModelSpec, *, pp: int, vp: int = 1, pipeline_layers: tuple[int, ...] = ()
) -> tuple[Stage, ...]:
    """What each pipeline rank holds.

    Raises:
        ModelError: the layers do not fill the chunks.
    """
    counts = chunk_layers(spec.num_layers, pp=pp, vp=vp, wanted=pipeline_layers)
    chunks, first = [], 0
    for number, count in enumerate(counts):
        moe = sum(spec.has_experts(layer) for layer in range(first, first + count))
        chunks.append(
            Chunk(
                dense_layers=count - moe,
                moe_layers=moe,
                has_embedding=number == 0,
                has_head=number == len(counts) - 1,
            )
        )
        first += count
    return tuple(tuple(chunks[rank::pp]) for rank in range(pp))


@lru_cache(maxsize=4096)
def layer_elements(spec: ModelSpec, *, experts: bool, tp: int, ep: int, etp: int) -> Elements:
    """One decoder layer on one rank.

    Args:
        spec: of the model.
        experts: whether it is a layer with experts.
        tp: ranks that split matrices.
        ep: ranks that share out experts.
        etp: ranks that split an expert's matrices.
    """
    hidden = spec.hidden_size
    dense = [hidden, hidden, *_attention(spec, tp)]
    if not experts:
        width = spec.ffn_hidden_size // tp
        return _elements([*dense, 2 * width * hidden, width * hidden])
    dense.append(spec.num_experts * hidden)
    if spec.shared_ffn_hidden_size:
        shared = spec.shared_ffn_hidden_size // tp
        dense += [2 * shared * hidden, shared * hidden]
    width = spec.moe_ffn_hidden_size // etp
    return _elements(dense, [2 * width * hidden, width * hidden] * (spec.num_experts // ep))


def _attention(spec: ModelSpec, tp: int) -> list[int]:
    hidden, heads = spec.hidden_size, spec.num_heads // tp
    if spec.latent is not None:
        latent, small = spec.latent, spec.latent.key_value_rank
        rank = latent.query_rank
        queries = (
            [heads * spec.head_dim * hidden]
            if rank is None
            else [rank * hidden, rank, heads * spec.head_dim * rank]
        )
        return [
            *queries,
            (small + latent.rotary_dim) * hidden,
            small,
            heads * (latent.plain_dim + latent.value_dim) * small,
            heads * latent.value_dim * hidden,
        ]
    # SGLang repeats key-value heads over more ranks than there are of them; the trainer refuses it.
    rows = (heads + 2 * max(1, spec.num_kv_heads // tp)) * spec.head_dim
    sizes = [rows * hidden, heads * spec.head_dim * hidden]
    if spec.qkv_bias:
        sizes.append(rows)
    if spec.qk_norm:
        sizes += [spec.head_dim, spec.head_dim]
    return sizes


def chunk_elements(
    spec: ModelSpec, chunk: Chunk, *, head: Head, tp: int, ep: int, etp: int
) -> Elements:
    """All parameters of one chunk; a tied output projection on another rank is a copy."""
    total = layer_elements(spec, experts=False, tp=tp, ep=ep, etp=etp) * chunk.dense_layers
    if chunk.moe_layers:
        total += layer_elements(spec, experts=True, tp=tp, ep=ep, etp=etp) * chunk.moe_layers
    vocabulary = padded_vocab_size(spec.vocab_size, tp=tp) // tp * spec.hidden_size
    if chunk.has_embedding:
        total += _elements([vocabulary])
    if chunk.has_head:
        total += _elements([spec.hidden_size])
        if head == "value":
            total += _elements([spec.hidden_size])
        elif not (spec.tied and chunk.has_embedding):
            total += _elements([vocabulary])
    return total


def model_elements(spec: ModelSpec, *, head: Head = "lm", tp: int = 1) -> int:
    """The whole model; with `tp` what each of so many ranks holds of it."""
    ((chunk,),) = stages(spec, pp=1)
    return chunk_elements(spec, chunk, head=head, tp=tp, ep=1, etp=tp).total
