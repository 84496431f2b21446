"""Which Hugging Face tensors make up which Megatron parameter: the one table for both directions.

It is keyed by the names of Megatron's Transformer Engine spec with layer and expert numbers of the
whole model; `canonical_name` folds the local spec's names, and numbers that count from a chunk's
first layer or a rank's first expert, into these. On the Hugging Face side every expert has tensors
of its own, as released models and `save_pretrained` have them; the stacked form that transformers
holds in memory is not read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megappo.models.parts import USUAL_NAMES, ExpertNames
from megappo.models.spec import ModelSpec

Kind = Literal["plain", "vocab", "qkv", "gate_up"]
Parts = tuple[tuple[str, tuple[int, ...]], ...]
Head = Literal["lm", "value"]

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
VALUE_HEAD = "score.weight"
OUTPUT_LAYER = "output_layer.weight"
ROUTER_BIAS = "expert_bias"


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter."""

    kind: Kind
    """How the parts join: one tensor; one with padded rows; `[q.. k v]` for each key-value head; or
    gate rows above up rows, which TP splits separately."""
    tp_dim: int | None
    """Dim that is split over the TP ranks, None for a parameter that all of them hold."""
    parts: Parts
    """Name and full shape of each Hugging Face tensor."""
    is_expert: bool = False
    """Held by one EP rank alone, and split over the expert-TP ranks in place of the TP ranks."""
    is_buffer: bool = False
    """Not trained, and float32 whatever the dtype of the model."""


def tensor_map(spec: ModelSpec, head: Head) -> dict[str, Entry]:
    """Every parameter of the model by its canonical name, in the order of the layers."""
    vocab = (spec.vocab_size, spec.hidden_size)
    table = {"embedding.word_embeddings.weight": Entry("vocab", 0, ((EMBEDDING, vocab),))}
    for layer in range(spec.num_layers):
        table |= _attention(spec, layer) if spec.latent is None else _latent_attention(spec, layer)
        table |= _experts(spec, layer) if spec.has_experts(layer) else _mlp(spec, layer)
    norm = ("model.norm.weight", (spec.hidden_size,))
    table["decoder.final_layernorm.weight"] = Entry("plain", None, (norm,))
    if head == "value":
        value = (VALUE_HEAD, (1, spec.hidden_size))
        table[OUTPUT_LAYER] = Entry("plain", None, (value,))
    else:
        table[OUTPUT_LAYER] = Entry("vocab", 0, ((EMBEDDING if spec.tied else LM_HEAD, vocab),))
    return table


def _attention(spec: ModelSpec, layer: int) -> dict[str, Entry]:
    here, there = f"decoder.layers.{layer}.self_attention.", f"model.layers.{layer}."
    hidden, dim = spec.hidden_size, spec.head_dim
    rows = {
        "q": spec.num_heads * dim,
        "k": spec.num_kv_heads * dim,
        "v": spec.num_kv_heads * dim,
    }
    attn = f"{there}self_attn."
    weights = tuple((f"{attn}{x}_proj.weight", (n, hidden)) for x, n in rows.items())
    output = (f"{attn}o_proj.weight", (hidden, rows["q"]))
    norm = (f"{there}input_layernorm.weight", (hidden,))
    table = {
        f"{here}linear_qkv.layer_norm_weight": Entry("plain", None, (norm,)),
        f"{here}linear_qkv.weight": Entry("qkv", 0, weights),
        f"{here}linear_proj.weight": Entry("plain", 1, (output,)),
    }
    if spec.qkv_bias:
        biases = tuple((f"{attn}{x}_proj.bias", (n,)) for x, n in rows.items())
        table[f"{here}linear_qkv.bias"] = Entry("qkv", 0, biases)
    if spec.qk_norm:
        for x in "qk":
            part = (f"{attn}{x}_norm.weight", (dim,))
            table[f"{here}{x}_layernorm.weight"] = Entry("plain", None, (part,))
    return table


def _latent_attention(spec: ModelSpec, layer: int) -> dict[str, Entry]:
    """The projections to small vectors are whole on every TP rank, those from them by heads."""
    assert spec.latent is not None
    latent, heads, hidden = spec.latent, spec.num_heads, spec.hidden_size
    here, there = f"decoder.layers.{layer}.self_attention.", f"model.layers.{layer}."
    attn, small = f"{there}self_attn.", latent.key_value_rank

    def part(name: str, *shape: int) -> Parts:
        return ((f"{attn}{name}.weight", shape),)

    norm = (f"{there}input_layernorm.weight", (hidden,))
    table = {f"decoder.layers.{layer}.input_layernorm.weight": Entry("plain", None, (norm,))}
    queries, rank = heads * latent.head_dim, latent.query_rank
    if rank is None:
        table[f"{here}linear_q_proj.weight"] = Entry("plain", 0, part("q_proj", queries, hidden))
    else:
        table |= {
            f"{here}linear_q_down_proj.weight": Entry(
                "plain", None, part("q_a_proj", rank, hidden)
            ),
            f"{here}linear_q_up_proj.layer_norm_weight": Entry(
                "plain", None, part("q_a_layernorm", rank)
            ),
            f"{here}linear_q_up_proj.weight": Entry("plain", 0, part("q_b_proj", queries, rank)),
        }
    wide = heads * (latent.plain_dim + latent.value_dim)
    down = part("kv_a_proj_with_mqa", small + latent.rotary_dim, hidden)
    return table | {
        f"{here}linear_kv_down_proj.weight": Entry("plain", None, down),
        f"{here}linear_kv_up_proj.layer_norm_weight": Entry(
            "plain", None, part("kv_a_layernorm", small)
        ),
        f"{here}linear_kv_up_proj.weight": Entry("plain", 0, part("kv_b_proj", wide, small)),
        f"{here}linear_proj.weight": Entry(
            "plain", 1, part("o_proj", hidden, heads * latent.value_dim)
        ),
    }


def _mlp(spec: ModelSpec, layer: int) -> dict[str, Entry]:
    here, there = f"decoder.layers.{layer}.mlp.", f"model.layers.{layer}."
    gate_up, down = _swiglu(f"{there}mlp.", spec.hidden_size, spec.ffn_hidden_size)
    norm = (f"{there}post_attention_layernorm.weight", (spec.hidden_size,))
    return {
        f"{here}linear_fc1.layer_norm_weight": Entry("plain", None, (norm,)),
        f"{here}linear_fc1.weight": Entry("gate_up", 0, gate_up),
        f"{here}linear_fc2.weight": Entry("plain", 1, down),
    }


def _experts(spec: ModelSpec, layer: int) -> dict[str, Entry]:
    here, names = f"decoder.layers.{layer}.", spec.expert_names
    there = f"model.layers.{layer}."
    block = f"{there}{names.block}."
    norm = (f"{there}post_attention_layernorm.weight", (spec.hidden_size,))
    router = (f"{block}gate.weight", (spec.num_experts, spec.hidden_size))
    table = {
        f"{here}pre_mlp_layernorm.weight": Entry("plain", None, (norm,)),
        f"{here}mlp.router.weight": Entry("plain", None, (router,)),
    }
    if spec.router.has_bias:
        bias = (f"{block}gate.e_score_correction_bias", (spec.num_experts,))
        table[f"{here}mlp.router.{ROUTER_BIAS}"] = Entry("plain", None, (bias,), is_buffer=True)
    if spec.shared_ffn_hidden_size:
        gate_up, down = _swiglu(
            f"{block}shared_experts.", spec.hidden_size, spec.shared_ffn_hidden_size
        )
        table[f"{here}mlp.shared_experts.linear_fc1.weight"] = Entry("gate_up", 0, gate_up)
        table[f"{here}mlp.shared_experts.linear_fc2.weight"] = Entry("plain", 1, down)
    for expert in range(spec.num_experts):
        prefix = f"{block}experts.{expert}."
        gate_up, down = _swiglu(prefix, spec.hidden_size, spec.moe_ffn_hidden_size, names)
        fc1, fc2 = (f"{here}mlp.experts.linear_{x}.weight{expert}" for x in ("fc1", "fc2"))
        table[fc1] = Entry("gate_up", 0, gate_up, is_expert=True)
        table[fc2] = Entry("plain", 1, down, is_expert=True)
    return table


def _swiglu(
    prefix: str, hidden: int, wide: int, names: ExpertNames = USUAL_NAMES
) -> tuple[Parts, Parts]:
    """Tensors of the two matrices of one MLP: gate and up, and down."""
    gate_up = tuple((f"{prefix}{x}.weight", (wide, hidden)) for x in (names.gate, names.up))
    return gate_up, ((f"{prefix}{names.down}.weight", (hidden, wide)),)


_NORMS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
LATENT_NORMS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""Names of norms in the local spec, and in Transformer Engine's, which has them in a product."""

_LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.linear_(fc[12])\.weight$")
_EXPERT = re.compile(r"(\.mlp\.experts\.linear_fc[12]\.weight)(\d+)$")


def canonical_name(
    name: str,
    layer_offset: int,
    *,
    expert_offset: int = 0,
    moe_layers: Sequence[bool] = (),
    latent: bool = False,
) -> str:
    """Name in `tensor_map` of a chunk's parameter.

    Args:
        name: As `named_parameters` of the chunk gives it, for either layer spec.
        layer_offset: Layers of the model before the chunk's first one.
        expert_offset: Experts of a layer on the EP ranks before this one.
        moe_layers: Of each layer of the model whether it has experts; its second norm then stands
            alone in both specs. Empty for a dense model.
        latent: The model has latent attention; its first norm stands alone in both specs.
    """
    name = re.sub(
        r"^decoder\.layers\.(\d+)\.",
        lambda m: f"decoder.layers.{int(m[1]) + layer_offset}.",
        name,
    )
    for local, fused in (LATENT_NORMS if latent else _NORMS).items():
        name = name.replace(f".{local}", f".{fused}")
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    if moe_layers and layer and moe_layers[int(layer[1])]:
        name = _LOCAL_EXPERT.sub(r".linear_\2.weight\1", name)
        return _EXPERT.sub(lambda m: f"{m[1]}{int(m[2]) + expert_offset}", name)
    return name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")


def hf_names(spec: ModelSpec, *, head: Head = "lm") -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model's Hugging Face folder."""
    return {name: shape for entry in tensor_map(spec, head).values() for name, shape in entry.parts}
