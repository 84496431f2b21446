import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig

from megappo.data.cost import SequenceCost
from megappo.models.spec import ModelSpec, spec_from_config

QWEN2_7B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}


def spec_of(config: object) -> ModelSpec:
    return spec_from_config(json.loads(config.to_json_string(use_diff=False)))


def weights_of_products(model: torch.nn.Module) -> int:
    """Elements of every matrix that multiplies each token; the embedding is only looked up."""
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))


def test_cost_of_a_hand_computed_model():
    """h 8, f 16, 2 heads of 4, 1 key-value head, 3 layers, vocabulary 10.

    A token: 3 x (2*8*(8+8) + 2*8*8 + 6*8*16) + 2*8*10 = 3 x (256 + 128 + 768) + 160 = 3616.
    A pair: 3 x 4 x 8 = 96; 5 tokens have 15 pairs.
    """
    spec = replace(
        spec_from_config(QWEN2_7B),
        hidden_size=8,
        ffn_hidden_size=16,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        num_layers=3,
        vocab_size=10,
    )
    cost = SequenceCost.of_model(spec)
    assert (cost.per_token, cost.per_pair) == (3616, 96)
    assert cost(5) == 5 * 3616 + 15 * 96
    assert cost(0) == 0


def test_a_7b_model_costs_two_operations_a_weight_and_token():
    """Qwen2.5-7B has 7.07e9 weights in matrix products (7.62e9 less the embedding)."""
    cost = SequenceCost.of_model(spec_from_config(QWEN2_7B))
    assert cost.per_token == pytest.approx(2 * 7.07e9, rel=2e-3)
    # Attention equals the rest where n / 2 pairs a token do: at about 70,000 tokens.
    assert cost.per_token / (cost.per_pair / 2) == pytest.approx(70_400, rel=0.01)


def test_the_linear_part_counts_the_weights_of_a_real_llama():
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert SequenceCost.of_model(spec_of(config)).per_token == 2 * weights_of_products(model)


def test_only_the_chosen_experts_of_a_token_count():
    """E 5, K 2, so three of five experts are idle; the first of three layers has a dense MLP."""
    config = Qwen3MoeConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=56,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=5,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
    )
    cost = SequenceCost.of_model(spec_of(config))
    # Projections 32 * (32 + 32) + 32 * 32 = 3072, dense MLP 3 * 32 * 56 = 5376, router 32 * 5,
    # one expert 3 * 32 * 24 = 2304.
    assert cost.per_token == 2 * (3 * 3072 + 5376 + 2 * (160 + 2 * 2304) + 32 * 48)


@pytest.mark.parametrize("n", [1, 2, 37])
def test_pairs_are_those_of_a_causal_mask(n):
    cost = SequenceCost(per_token=0, per_pair=1)
    assert cost(n) == torch.ones(n, n).tril().sum().item()
