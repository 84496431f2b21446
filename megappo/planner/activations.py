"""Bytes that a forward pass keeps for its backward pass, and the widest moment of a pipeline.

What a layer keeps is listed tensor by tensor, as Korthikanti et al. 2022 (arXiv 2205.05198, section
4) do for GPT, here for RMSNorm, grouped key-value heads, flash attention, SwiGLU, experts and
latent attention, without dropout. Legend: sizes count bytes a token of this rank (a position of
S / CP); a share is what sequence parallelism leaves of a token's hidden state. D bytes of the
model's dtype, h hidden size, q and k query and key-value heads on this rank of d dims each, f
columns of the MLP on this rank.

Two sets of kernels differ in what they keep: Transformer Engine's on CUDA, and Megatron's local
layers on a CPU, where it was measured (docs/planner.md).

    norm and the product after it    CUDA 2 h D + 4       CPU 2 h 4 + 4 + h D
    attention                        CUDA (2 q + 2 k) d D + 4 q
                                     CPU adds copies in the order of sequences, and RoPE's angles
    MLP                              CUDA 3 f D           CPU 5 f D
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megappo.models.build import Recompute, padded_vocab_size
from megappo.models.spec import ModelSpec
from megappo.planner.constants import DTYPE_BYTES
from megappo.planner.flops import Head
from megappo.planner.layout import Layout, outstanding
from megappo.planner.parameters import Stage

Device = Literal["cpu", "cuda"]
_INDEX, _FLOAT = 8, 4


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What decides about the bytes of a token."""

    dtype: str
    device: Device = "cuda"
    mean_length: float = 0.0
    """Tokens of a sequence; matters where scores or masks are kept (CPU: CP, latent attention)."""

    @property
    def bytes(self) -> int:
        """Of a number."""
        return DTYPE_BYTES[self.dtype]


@lru_cache(maxsize=4096)
def layer_bytes(spec: ModelSpec, layout: Layout, kernels: Kernels, *, experts: bool) -> float:
    """What one layer keeps, bytes a token."""
    share = 1 / layout.token_split
    total = 2 * share * _norm(spec.hidden_size, kernels)
    total += _projections(spec, layout, kernels) + _core_attention(spec, layout, kernels)
    if not experts:
        return total + _mlp(spec.ffn_hidden_size / layout.tp, kernels)
    total += _mlp(spec.shared_ffn_hidden_size / layout.tp, kernels)
    return total + share * (
        _router(spec, kernels)
        + spec.experts_per_token * layout.etp * _expert_row(spec, layout, kernels)
    )


def _norm(width: int, kernels: Kernels) -> float:
    """A norm over `width` numbers, and the input of the product after it."""
    if kernels.device == "cuda":
        return 2 * width * kernels.bytes + _FLOAT
    return 2 * width * _FLOAT + _FLOAT + width * kernels.bytes


def _mlp(columns: float, kernels: Kernels) -> float:
    return (3 if kernels.device == "cuda" else 5) * columns * kernels.bytes


def _router(spec: ModelSpec, kernels: Kernels) -> float:
    """Scores, the choice, and where chosen tokens went."""
    scores = 3 * spec.num_experts * _FLOAT + _FLOAT
    if kernels.device == "cuda":
        return scores + spec.experts_per_token * 3 * _FLOAT
    places = spec.num_experts * (1 + _FLOAT) + spec.experts_per_token * (2 * _INDEX + _FLOAT)
    return scores + places


def _expert_row(spec: ModelSpec, layout: Layout, kernels: Kernels) -> float:
    """One token at one expert, bytes a row."""
    columns = spec.moe_ffn_hidden_size / layout.etp
    inner = (3 if kernels.device == "cuda" else 6) * columns
    return (spec.hidden_size + inner) * kernels.bytes + _FLOAT


def _projections(spec: ModelSpec, layout: Layout, kernels: Kernels) -> float:
    """Around the core attention: norms of queries and keys, angles, the output product's input."""
    heads, kv_heads = spec.num_heads / layout.tp, spec.num_kv_heads / layout.tp
    on_cuda = kernels.device == "cuda"
    # Padded sequences share their angles, which are then few.
    angles = 0 if on_cuda or not layout.packed else 4 * spec.rotary_dim * kernels.bytes
    if spec.latent is not None:
        latent = spec.latent
        small = latent.key_value_rank + (latent.query_rank or 0)
        output = 0 if on_cuda else heads * latent.value_dim * kernels.bytes
        return _norm(small, kernels) + angles + output
    queries, keys = heads * spec.head_dim, kv_heads * spec.head_dim
    # The core attention's output is the product's input; packed on a CPU, that is a copy in order.
    total = angles + (0 if on_cuda or not layout.packed else queries * kernels.bytes)
    if not spec.qk_norm:
        return total
    total += _FLOAT * (heads + kv_heads)
    if on_cuda:
        return total + (queries + keys) * kernels.bytes
    if kernels.bytes == _FLOAT:  # keys are a view of the whole projection
        return total + (3 * queries + 3 * keys) * _FLOAT
    return total + (2 * queries + 2 * keys) * _FLOAT


def _core_attention(spec: ModelSpec, layout: Layout, kernels: Kernels) -> float:
    heads, size = spec.num_heads / layout.tp, kernels.bytes
    kv_heads = spec.num_kv_heads / layout.tp
    value_dim = spec.head_dim if spec.latent is None else spec.latent.value_dim
    queries, keys, values = heads * spec.head_dim, kv_heads * spec.head_dim, kv_heads * value_dim
    if kernels.device == "cuda":
        return (queries + keys + values + heads * value_dim) * size + heads * _FLOAT
    # Keys and values of all CP ranks are gathered.
    total = (queries + layout.cp * (keys + values)) * size
    if spec.latent is None:
        total += queries * size + heads * _FLOAT
    else:  # values of another width: PyTorch's plain kernel, which keeps the scores
        total += heads * kernels.mean_length * _FLOAT
    if layout.packed:
        total += (2 + layout.cp) * _INDEX + 1
    elif layout.cp > 1:
        total += layout.cp * _INDEX
    if layout.cp > 1:
        total += kernels.mean_length * size
    return total


def kept_bytes(
    spec: ModelSpec, layout: Layout, kernels: Kernels, recompute: Recompute, *, experts: bool
) -> float:
    """What one layer keeps until its backward pass, bytes a token."""
    if recompute == "full":
        return spec.hidden_size / layout.token_split * kernels.bytes
    whole = layer_bytes(spec, layout, kernels, experts=experts)
    if recompute == "none":
        return whole
    heads, kv_heads = spec.num_heads / layout.tp, spec.num_kv_heads / layout.tp
    queries, keys = heads * spec.head_dim, kv_heads * spec.head_dim
    inputs = (queries + 2 * keys) * kernels.bytes
    if spec.latent is not None:
        inputs = (queries + keys + kv_heads * spec.latent.value_dim) * kernels.bytes
    elif kernels.device == "cpu":
        inputs += queries * kernels.bytes  # the rotated queries beside the whole projection
        inputs += keys * kernels.bytes
        if spec.qk_norm and kernels.bytes == _FLOAT:
            inputs -= (queries + 2 * keys) * kernels.bytes  # the projection is kept already
    if kernels.device == "cuda":  # the output product's input stays
        value_dim = spec.head_dim if spec.latent is None else spec.latent.value_dim
        inputs += heads * value_dim * kernels.bytes
    return whole - _core_attention(spec, layout, kernels) + inputs


def head_bytes(spec: ModelSpec, layout: Layout, kernels: Kernels, head: Head) -> float:
    """Last norm, the head's input, and logits or values, bytes a token."""
    share = 1 / layout.token_split
    if head == "value":
        norm = _norm(spec.hidden_size, kernels) - spec.hidden_size * kernels.bytes
        return share * (norm + spec.hidden_size * _FLOAT) + 2 * _FLOAT
    return share * _norm(spec.hidden_size, kernels) + logit_bytes(spec, layout, kernels)


def logit_bytes(spec: ModelSpec, layout: Layout, kernels: Kernels) -> float:
    """Logits in the model's dtype, and a target and two sums in float32, bytes a token."""
    columns = padded_vocab_size(spec.vocab_size, tp=layout.tp) // layout.tp
    return columns * kernels.bytes + _INDEX + 2 * _FLOAT


def peak_bytes(
    spec: ModelSpec,
    layout: Layout,
    kernels: Kernels,
    stage: Stage,
    *,
    rank: int,
    num_micro: int,
    recompute: Recompute,
    head: Head,
) -> float:
    """Most that a stage holds at a time in an update, bytes a token of a micro-batch.

    Args:
        spec: of the model.
        layout: of the ranks.
        kernels: that compute.
        stage: what the rank holds.
        rank: of the stage in the pipeline.
        num_micro: micro-batches of a mini-batch.
        recompute: what is not kept.
        head: of the model.
    """
    widest = 0.0
    chunk_sizes = []
    for chunk in stage:
        size = 0.0
        for experts, count in ((False, chunk.dense_layers), (True, chunk.moe_layers)):
            if count:
                kept = kept_bytes(spec, layout, kernels, recompute, experts=experts)
                whole = layer_bytes(spec, layout, kernels, experts=experts)
                size += count * kept
                widest = max(widest, whole - kept)
        chunk_sizes.append(size + (_INDEX if chunk.has_embedding else 0))
    top = head_bytes(spec, layout, kernels, head) if stage[-1].has_head else 0.0
    states = outstanding(pp=layout.pp, vp=layout.vp, rank=rank, num_micro=num_micro)
    held = max(sum(n * size for n, size in zip(s, chunk_sizes, strict=True)) for s in states)
    # The head's backward pass is over before the first layer is computed again.
    return held + max(top, widest)
