"""The arguments of Megatron-LM that describe a model, as a checkpoint of its own has them.

Megatron-LM compares some of them with its command line, and takes more with
`--use-checkpoint-args`. RoPE scaling is left out: it is set on the command line.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megappo.checkpoint.convert.file_layout import Layout
from megappo.models.spec import ModelSpec


def megatron_arguments(
    spec: ModelSpec, layout: Layout, *, padded_vocab_size: int, vocab_multiple: int
) -> Namespace:
    """By the names that Megatron-LM gives them.

    Args:
        spec: The model.
        layout: That the files are cut for.
        padded_vocab_size: Rows of the embedding.
        vocab_multiple: What they are a multiple of, times TP.
    """
    return Namespace(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_hidden_size,
        num_attention_heads=spec.num_heads,
        group_query_attention=spec.num_kv_heads != spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        max_position_embeddings=spec.max_positions,
        seq_length=spec.max_positions,
        position_embedding_type="rope",
        add_position_embedding=True,
        rotary_base=int(spec.rope.theta),
        rotary_percent=spec.rope.fraction,
        swiglu=True,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm or spec.latent is not None,
        normalization="RMSNorm",
        norm_epsilon=spec.norm_eps,
        untie_embeddings_and_output_weights=not spec.tied,
        make_vocab_size_divisible_by=vocab_multiple,
        padded_vocab_size=padded_vocab_size,
        tokenizer_type="HuggingFaceTokenizer",
        **_expert_arguments(spec),
        **_latent_arguments(spec),
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        virtual_pipeline_model_parallel_size=None,
        ckpt_format="torch_dist",
        no_save_optim=True,
        no_save_rng=True,
    )


def _expert_arguments(spec: ModelSpec) -> dict[str, Any]:
    """Megatron-LM's arguments for experts and routers."""
    rule = spec.router
    return {
        "num_experts": spec.num_experts or None,
        "moe_layer_freq": [int(x) for x in spec.moe_layers] or 1,
        "moe_ffn_hidden_size": spec.moe_ffn_hidden_size or None,
        "moe_shared_expert_intermediate_size": spec.shared_ffn_hidden_size or None,
        "moe_router_topk": spec.experts_per_token or 2,
        "moe_router_pre_softmax": bool(spec.num_experts) and not spec.norm_topk_prob,
        "moe_router_score_function": rule.score,
        "moe_router_enable_expert_bias": rule.has_bias,
        "moe_router_num_groups": rule.num_groups if rule.num_groups > 1 else None,
        "moe_router_group_topk": rule.groups_per_token if rule.num_groups > 1 else None,
        "moe_router_topk_scaling_factor": rule.scale if rule.scale != 1.0 else None,
    }


def _latent_arguments(spec: ModelSpec) -> dict[str, Any]:
    """Megatron-LM's arguments for latent attention."""
    if spec.latent is None:
        return {"multi_latent_attention": False}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": spec.latent.query_rank,
        "kv_lora_rank": spec.latent.key_value_rank,
        "qk_head_dim": spec.latent.plain_dim,
        "qk_pos_emb_head_dim": spec.latent.rotary_dim,
        "v_head_dim": spec.latent.value_dim,
    }
