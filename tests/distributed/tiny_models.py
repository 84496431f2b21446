"""Random models of every family, small enough for a test, as complete Hugging Face folders.

Weights are larger than a fresh model's so that logits spread and a wrong layer shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

VOCAB = 131
"""Odd, so that every TP degree above 1 pads it."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 6.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 2000.0, "factor": 3.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
LATENT_ROPE = YARN_ROPE | {"beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.7}

MODELS: dict[str, dict[str, Any]] = {
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama3_rope": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "qwen2_tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "mistral": {"model_type": "mistral", "sliding_window": None, "rope_parameters": LINEAR_ROPE},
}

SHARED_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}
LATENT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "rope_parameters": LATENT_ROPE,
}

MOE_MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "qwen3_moe_raw_weights": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
    },
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "num_hidden_layers": 3,
        "head_dim": 32,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.5,
        "n_group": 1,
        "topk_group": 1,
        **SHARED_EXPERTS,
    },
    "deepseek_v2_lite": {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "num_experts_per_tok": 3,
        "topk_method": "greedy",
        **LATENT,
        **SHARED_EXPERTS,
        "n_shared_experts": 2,
    },
    "deepseek_v2_groups": {
        "model_type": "deepseek_v2",
        "q_lora_rank": 24,
        "num_experts_per_tok": 3,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 4.0,
        **LATENT,
        **SHARED_EXPERTS,
        "rope_parameters": None,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "q_lora_rank": 24,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        **LATENT,
        **SHARED_EXPERTS,
    },
}
"""Apart, because experts under TP need sequence parallelism."""


def save_tiny_model(folder: Path, settings: dict[str, Any], *, seed: int = 0) -> None:
    """Writes config, weights, a word-level tokenizer and the side files that a release has."""
    # Here, because workers need `sequences` only and transformers takes seconds to import.
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**(COMMON | settings))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        biases = [item for item in model.named_buffers() if item[0].endswith("correction_bias")]
        for name, parameter in [*model.named_parameters(), *biases]:
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(centre + 0.15 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    save_side_files(folder)


def save_side_files(folder: Path) -> None:
    """The files of a release that are neither weights nor config."""
    vocab = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (folder / "LICENSE").write_text("as you like")


def sequences() -> list[torch.Tensor]:
    """Token ids of uneven lengths, among them a single token and two of similar length."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, VOCAB, (n,), generator=generator) for n in (7, 1, 23, 22, 12)]


FAR_POSITIONS = (1, 3000)


def far_sequences() -> tuple[torch.Tensor, torch.Tensor]:
    """A short sequence, and one that reaches the last of `FAR_POSITIONS`."""
    generator = torch.Generator().manual_seed(4)
    short, long = (torch.randint(2, VOCAB, (n,), generator=generator) for n in (5, 3001))
    return short, long
