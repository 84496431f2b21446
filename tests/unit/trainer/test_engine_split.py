"""What SGLang cannot split over `rollout.tp` processes, or does not know, is refused."""

import json

import pytest

from megappo.config import ConfigError
from megappo.models.spec import load_spec
from megappo.trainer.model_checks import check_engine_split

COMMON = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
EXPERTS = {
    "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}  # fmt: skip


@pytest.fixture
def make(tmp_path):
    def build(**settings):
        (tmp_path / "config.json").write_text(json.dumps(COMMON | settings))
        for name in ("model.safetensors", "tokenizer.json"):
            (tmp_path / name).write_text("not read here")
        return load_spec(tmp_path)

    return build


@pytest.mark.parametrize(
    ("settings", "tp"),
    [
        ({"model_type": "qwen2"}, 2),
        ({"model_type": "qwen2"}, 4),  # two key-value heads, repeated
        ({"model_type": "qwen2", "num_key_value_heads": 1}, 2),
        (EXPERTS, 2),  # 12 columns of an expert each
        (EXPERTS | {"intermediate_size": 97}, 2),  # of dense layers, which it does not have
    ],
    ids=str,
)
def test_what_divides_is_split(make, settings, tp):
    check_engine_split(make(**settings), tp)


@pytest.mark.parametrize(
    ("settings", "tp", "message"),
    [
        ({"model_type": "qwen2"}, 3, "rollout.tp is 3: the actor has 4 attention heads"),
        ({"model_type": "qwen2", "intermediate_size": 98}, 4, "98 MLP columns"),
        (EXPERTS | {"moe_intermediate_size": 25}, 2, "25 columns of an expert"),
        (
            {"model_type": "qwen2", "num_attention_heads": 12, "num_key_value_heads": 4,
             "hidden_size": 96},
            6,
            "4 key-value heads",
        ),
        (EXPERTS | {"mlp_only_layers": [1]}, 1, r"layers \[1\] have no experts"),
        (EXPERTS | {"decoder_sparse_step": 2}, 2, r"layers \[0, 2\] have no experts"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_is_refused(make, settings, tp, message):
    with pytest.raises(ConfigError, match=message):
        check_engine_split(make(**settings), tp)
