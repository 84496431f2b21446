"""Every family and RoPE type far from the start of a sequence, and what is refused of each family.

What a family computes in every layout is in test_models and test_moe.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Linear

from megappo.data.cost import SequenceCost
from megappo.errors import ModelError
from megappo.models.families.refused import REFUSED
from megappo.models.hf_folder import write_folder
from megappo.models.name_map import hf_names
from megappo.models.parts import RouterRule
from megappo.models.rope import inverse_frequencies, read_rope
from megappo.models.routing import choose_experts
from megappo.models.spec import load_spec, spec_from_config
from megappo.models.weights import check_weights
from tests.distributed.launch import run_ranks
from tests.distributed.test_models import config_json, stored
from tests.distributed.tiny_models import (
    COMMON,
    FAR_POSITIONS,
    LATENT,
    LINEAR_ROPE,
    LLAMA3_ROPE,
    MODELS,
    MOE_MODELS,
    SHARED_EXPERTS,
    YARN_ROPE,
    far_sequences,
    save_side_files,
    save_tiny_model,
)

pytestmark = pytest.mark.timeout(1500)

SHORT = {"num_hidden_layers": 2, "max_position_embeddings": 4096}
BY_ROPE = {
    f"{name}_{rope['rope_type']}": {**MODELS[name], "rope_parameters": rope}
    for name, rope in (
        ("qwen2_tied", YARN_ROPE | {"beta_fast": 20, "beta_slow": 2}),
        ("qwen3", YARN_ROPE),
        ("llama_tied", YARN_ROPE),
        ("mistral", LLAMA3_ROPE),
    )
} | {
    "glm4_moe_linear": MOE_MODELS["glm4_moe"]
    | {"rope_parameters": LINEAR_ROPE | {"partial_rotary_factor": 0.5}},
    "deepseek_v3_linear": MOE_MODELS["deepseek_v3"] | {"rope_parameters": LINEAR_ROPE},
}


@pytest.fixture(scope="module")
def far_models(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("far")
    for name, settings in (MODELS | MOE_MODELS | BY_ROPE).items():
        save_tiny_model(root / name, settings | SHORT)
    return root


@pytest.fixture(scope="module")
def far_results(far_models, tmp_path_factory) -> dict[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("far_results") / "results.pt"
    where = ("--models", str(far_models), "--out", str(out))
    run_ranks("far_positions.py", 1, *where, timeout_s=600)
    return torch.load(out, weights_only=True)


@pytest.mark.distributed
def test_logits_equal_transformers_at_positions_1_and_3000(far_models, far_results):
    from transformers import AutoModelForCausalLM

    assert far_results.keys() == {folder.name for folder in far_models.iterdir()}
    for name, result in far_results.items():
        model = AutoModelForCausalLM.from_pretrained(far_models / name, dtype=torch.float32)
        with torch.no_grad():
            expected = model(far_sequences()[1][None]).logits[0, list(FAR_POSITIONS)]
        assert expected.abs().max() > 1
        assert (result["logits"] - expected).abs().max() < 1e-4, name


@pytest.mark.distributed
def test_biases_of_routers_stay_float32_in_a_bfloat16_model(far_models, far_results):
    biased = [name for name in far_results if name.startswith(("glm4", "deepseek_v3"))]
    assert len(biased) == 4
    for name in biased:
        wanted = stored(far_models / name)
        found = far_results[name]["biases"]
        assert list(found) == ["model.layers.1.mlp.gate.e_score_correction_bias"]
        assert all(torch.equal(wanted[n], t) for n, t in found.items())


@pytest.mark.distributed
def test_norms_of_latent_models_are_saved_under_transformer_engines_names(far_results):
    both = {
        "input_layernorm.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
    }
    expected = {f"{layer}.{name}" for layer in (0, 1) for name in both} | {
        "0.mlp.linear_fc1.layer_norm_weight",
        "1.pre_mlp_layernorm.weight",
        "decoder.final_layernorm.weight",
    }
    assert far_results["deepseek_v3"]["norm_keys"] == expected


YARNS = {
    "plain": YARN_ROPE,
    "other ramp": YARN_ROPE | {"beta_fast": 4, "beta_slow": 3.5},
    "a ramp without width": YARN_ROPE | {"beta_fast": 1, "beta_slow": 1, "factor": 1.0},
    "Qwen3": YARN_ROPE | {"rope_theta": 1e6, "original_max_position_embeddings": 32768},
}


@pytest.mark.parametrize("case", YARNS)
def test_yarn_equals_transformers_in_both_spellings(case):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = YARNS[case]
    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        rope_parameters=dict(rope),
    )
    expected = LlamaRotaryEmbedding(config)
    old = {k: v for k, v in rope.items() if k not in ("rope_theta", "rope_type")}
    spellings = (
        {"rope_parameters": rope},
        {"rope_theta": rope["rope_theta"], "rope_scaling": old | {"type": "yarn"}},
    )
    for spelling in spellings:
        found = read_rope(spelling)
        assert torch.equal(inverse_frequencies(found, 128), expected.inv_freq)
        assert found.embedding_scale == pytest.approx(expected.attention_scaling, rel=1e-12)


def test_the_factors_of_latent_yarn_are_those_of_deepseek():
    # 0.1 * 0.707 * ln 40 + 1 = 1.2608, its square 1.58962, as in DeepSeek-V2's attention.
    rope = YARN_ROPE | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}
    found = read_rope({"rope_parameters": rope}, latent=True)
    assert found.embedding_scale == 1.0
    assert found.score_scale == pytest.approx(1.58962, abs=1e-5)


def test_defaults_of_transformers_are_those_of_the_family():
    def rope_of(model_type: str, **settings: Any) -> tuple[float, float]:
        rope = spec_from_config(config_json(model_type, **settings)).rope
        return rope.theta, rope.fraction

    glm = {"num_experts_per_tok": 2, "head_dim": 16, **SHARED_EXPERTS}
    mixtral = {"num_local_experts": 4, "num_experts_per_tok": 2}
    assert rope_of("mixtral", **mixtral) == (1e6, 1.0)
    assert rope_of("mixtral", **mixtral, rope_theta=5e5) == (5e5, 1.0)
    assert rope_of("glm4_moe", **glm) == (1e4, 0.5)
    assert rope_of("glm4_moe", **glm, partial_rotary_factor=0.25) == (1e4, 0.25)


def deepseek(version: int = 3, **settings: Any) -> dict[str, Any]:
    wanted = {"q_lora_rank": None, "num_experts_per_tok": 3} | LATENT | SHARED_EXPERTS
    return config_json(f"deepseek_v{version}", **(wanted | settings))


def glm(**settings: Any) -> dict[str, Any]:
    wanted = {"num_experts_per_tok": 2, "head_dim": 16} | SHARED_EXPERTS
    return config_json("glm4_moe", **(wanted | settings))


WRONG = {
    "window": (
        config_json("mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=64),
        "64 tokens",
    ),
    "no experts": (config_json("mixtral", num_experts_per_tok=2), "lacks num_local_experts"),
    "one of many, normalised": (
        config_json("mixtral", num_local_experts=4, num_experts_per_tok=1),
        "the router has no gradient",
    ),
    "attention bias": (deepseek(attention_bias=True), "attention_bias=True"),
    "eps": (deepseek(rms_norm_eps=1e-5), "rms_norm_eps=1e-05"),
    "grouped heads": (deepseek(num_key_value_heads=2), "num_key_value_heads is 2"),
    "halves": (deepseek(rope_interleave=False), "rope_interleave=false"),
    "no rank": (
        {k: v for k, v in deepseek().items() if k != "q_lora_rank"},
        "lacks q_lora_rank",
    ),
    "no inner size": (deepseek(kv_lora_rank=None), "lacks kv_lora_rank"),
    "normalised V2": (deepseek(2, norm_topk_prob=True), "norm_topk_prob=True"),
    "another method": (deepseek(2, topk_method="noaux_tc"), "topk_method='noaux_tc'"),
    "another score": (deepseek(scoring_func="softmax"), "scoring_func='softmax'"),
    "every other layer": (deepseek(moe_layer_freq=2), "moe_layer_freq=2"),
    "no shared experts": (deepseek(n_shared_experts=0), "lacks n_shared_experts"),
    "all dense": (deepseek(first_k_dense_replace=3), "none of the 3 layers"),
    "groups": (deepseek(n_group=3, topk_group=2), "n_group=3 must divide n_routed_experts=8"),
    "small groups": (deepseek(n_group=8, topk_group=4), "a group's score, which adds up 2"),
    "few groups": (deepseek(n_group=4, topk_group=1), "too few for num_experts_per_tok=3"),
    "two scales": (
        deepseek(rope_parameters=LATENT["rope_parameters"] | {"mscale": 1.0}),
        "mscale=1.0 and mscale_all_dim=0.7",
    ),
    "yarn without scales": (
        deepseek(rope_parameters=YARN_ROPE),
        "takes exactly the parameters .*'mscale'",
    ),
    "fractions": (
        glm(partial_rotary_factor=0.5, rope_parameters={"partial_rotary_factor": 0.25}),
        r"twice and differently: \[0.25, 0.5\]",
    ),
    "no fraction": (glm(partial_rotary_factor=0.0), "over 0 and at most 1, not 0.0"),
    "scales without latent attention": (
        config_json("llama", rope_parameters=YARN_ROPE | {"attention_factor": 1.5}),
        "takes exactly .*'attention_factor'",
    ),
    "longrope": (config_json("qwen3", head_dim=16, rope_scaling={"type": "longrope"}), "longrope"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_setting_that_would_change_the_model_is_refused(case):
    config, message = WRONG[case]
    with pytest.raises(ModelError, match=message):
        spec_from_config(config)


def test_settings_of_released_configs_are_accepted():
    v3 = deepseek(
        n_group=4, topk_group=2, topk_method="noaux_tc", scoring_func="sigmoid", ep_size=1,
        aux_loss_alpha=0.001, seq_aux=True, pretraining_tp=1, num_nextn_predict_layers=1,
    )  # fmt: skip
    spec = spec_from_config(v3)
    assert (spec.router.best_of_group, spec.dropped_layers, spec.head_dim) == (2, 1, 24)
    assert spec_from_config(deepseek(2, scoring_func="softmax")).router.num_groups == 1
    assert spec_from_config(glm(use_qk_norm=True)).qk_norm


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_family_that_megatron_cannot_express_is_refused_with_the_reason(model_type, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_json(model_type)))
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(ModelError, match=f"model_type '{model_type}' is not supported: ") as error:
        load_spec(tmp_path)
    assert REFUSED[model_type] in str(error.value)


def test_experts_are_chosen_within_the_best_groups():
    """Scores .9 .1 | .6 .5 | .2 .8, sigmoids, the last group raised by a bias of .3 and .1.

    By sums of two, groups have 1.0, 1.1 and 1.4, by their best .9, .6 and .9 (the bias counts).
    """
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.2, 0.8]])
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.3, 0.1])

    def choose(best_of_group: int, *, normalized: bool) -> list[float]:
        rule = RouterRule(
            score="sigmoid",
            has_bias=True,
            num_groups=3,
            groups_per_token=2,
            best_of_group=best_of_group,
            scale=2.0,
        )
        weights, chosen = choose_experts(
            torch.logit(scores), bias, experts_per_token=2, rule=rule, normalized=normalized
        )
        assert chosen.equal(weights > 0)
        return [round(x, 5) for x in weights[0].tolist()]

    assert choose(2, normalized=False) == [0, 0, 1.2, 0, 0, 1.6]
    assert choose(1, normalized=False) == [1.8, 0, 0, 0, 0, 1.6]
    # 0.6 / 1.4 and 0.8 / 1.4, twice.
    assert choose(2, normalized=True) == [0, 0, 0.85714, 0, 0, 1.14286]


def test_cost_counts_the_products_of_latent_attention_and_shared_experts():
    from transformers import AutoConfig, AutoModelForCausalLM

    for name in ("deepseek_v3", "deepseek_v2_lite", "glm4_moe"):
        settings = COMMON | MOE_MODELS[name]
        config = AutoConfig.for_model(**settings)
        model = AutoModelForCausalLM.from_config(config)
        spec = spec_from_config(json.loads(config.to_json_string(use_diff=False)))
        per_token = sum(m.weight.numel() for m in model.modules() if isinstance(m, Linear))
        for layer in model.model.layers[1:]:
            per_token += layer.mlp.gate.weight.numel()
            per_token += sum(x.numel() for x in layer.mlp.experts.parameters()) // 8 * 3
        assert SequenceCost.of_model(spec).per_token == 2 * per_token
    latent = SequenceCost.of_model(spec_from_config(deepseek()))
    assert latent.per_pair == 3 * 2 * 4 * (24 + 20)


def test_a_written_folder_counts_no_dropped_layers(tmp_path):
    save_tiny_model(tmp_path / "source", MOE_MODELS["glm4_moe"] | {"num_nextn_predict_layers": 1})
    tensors = stored(tmp_path / "source")
    write_folder(tensors.items(), tmp_path / "source", tmp_path / "out")
    assert load_spec(tmp_path / "source").dropped_layers == 1
    assert load_spec(tmp_path / "out").dropped_layers == 0


def test_layers_that_predict_several_tokens_are_dropped_and_nothing_else(tmp_path):
    from safetensors.torch import save_file

    save_tiny_model(tmp_path, MOE_MODELS["glm4_moe"] | {"num_nextn_predict_layers": 1})
    save_side_files(tmp_path)
    tensors, spec = stored(tmp_path), load_spec(tmp_path)
    assert tensors.keys() == hf_names(spec).keys()
    extra = {"model.layers.3.enorm.weight": torch.zeros(64)}
    save_file(tensors | extra, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_weights(tmp_path, spec, head="lm")
    beyond = {"model.layers.4.enorm.weight": torch.zeros(64)}
    save_file(tensors | beyond, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"unknown model\.layers\.4\.enorm\.weight"):
        check_weights(tmp_path, spec, head="lm")
