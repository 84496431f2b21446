"""Which Hugging Face tensors make up which Megatron parameter: the one table for both directions.

It is keyed by the names of Megatron's Transformer Engine spec with layer numbers of the whole
model; `canonical_name` folds the local spec's names, and numbers that count from a chunk's first
layer, into these.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from megappo.models.spec import ModelSpec

Kind = Literal["plain", "vocab", "qkv", "gate_up"]
Head = Literal["lm", "value"]

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
VALUE_HEAD = "score.weight"
OUTPUT_LAYER = "output_layer.weight"


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter."""

    kind: Kind
    """How the parts join: one tensor; one with padded rows; `[q.. k v]` for each key-value head; or
    gate rows above up rows, which TP splits separately."""
    tp_dim: int | None
    """Dim that is split over the TP ranks, None for a parameter that all of them hold."""
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and full shape of each Hugging Face tensor."""


def tensor_map(spec: ModelSpec, head: Head) -> dict[str, Entry]:
    """Every parameter of the model by its canonical name, in the order of the layers."""
    vocab = (spec.vocab_size, spec.hidden_size)
    table = {"embedding.word_embeddings.weight": Entry("vocab", 0, ((EMBEDDING, vocab),))}
    for layer in range(spec.num_layers):
        table |= _attention(spec, layer) | _mlp(spec, layer)
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


def _mlp(spec: ModelSpec, layer: int) -> dict[str, Entry]:
    here, there = f"decoder.layers.{layer}.mlp.", f"model.layers.{layer}."
    wide = (spec.ffn_hidden_size, spec.hidden_size)
    gate_up = tuple((f"{there}mlp.{x}_proj.weight", wide) for x in ("gate", "up"))
    norm = (f"{there}post_attention_layernorm.weight", (spec.hidden_size,))
    down = (f"{there}mlp.down_proj.weight", (spec.hidden_size, spec.ffn_hidden_size))
    return {
        f"{here}linear_fc1.layer_norm_weight": Entry("plain", None, (norm,)),
        f"{here}linear_fc1.weight": Entry("gate_up", 0, gate_up),
        f"{here}linear_fc2.weight": Entry("plain", 1, (down,)),
    }


def canonical_name(name: str, layer_offset: int) -> str:
    """Name in `tensor_map` of a chunk's parameter.

    Args:
        name: As `named_parameters` of the chunk gives it, for either layer spec.
        layer_offset: Layers of the model before the chunk's first one.
    """
    name = re.sub(
        r"^decoder\.layers\.(\d+)\.",
        lambda m: f"decoder.layers.{int(m[1]) + layer_offset}.",
        name,
    )
    name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    return name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")


def hf_names(spec: ModelSpec, *, head: Head = "lm") -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model's Hugging Face folder."""
    return {name: shape for entry in tensor_map(spec, head).values() for name, shape in entry.parts}
