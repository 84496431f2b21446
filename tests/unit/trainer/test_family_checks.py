"""What a run says of its models' families before it starts."""

import pytest

from megappo.config import load
from megappo.errors import UserError
from megappo.models.spec import ModelSpec, spec_from_config
from megappo.trainer import model_checks, preflight
from tests.distributed.tiny_models import COMMON, MOE_MODELS


def spec_of(name: str, **settings: object) -> ModelSpec:
    return spec_from_config(COMMON | MOE_MODELS[name] | settings)


def test_latent_attention_is_refused_for_rollouts_by_sglang_alone():
    latent = spec_of("deepseek_v3")
    with pytest.raises(UserError, match=r"a deepseek_v3 model: .* set rollout\.engine=megatron"):
        model_checks.check_engine_family(latent, "sglang")
    model_checks.check_engine_family(latent, "megatron")
    model_checks.check_engine_family(spec_of("glm4_moe"), "sglang")


def test_shared_experts_must_divide_over_an_engines_processes():
    odd = spec_of("glm4_moe", moe_intermediate_size=33, first_k_dense_replace=0)
    model_checks.check_engine_split(odd, 1)
    with pytest.raises(UserError, match="33 columns of"):
        model_checks.check_engine_split(odd, 2)


def test_dropped_layers_are_named_at_the_start(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {train_files: [t], val_files: [v]}\n")
    dropping = spec_of("deepseek_v3", num_nextn_predict_layers=1)
    specs = {"actor": dropping, "critic": spec_of("mixtral")}
    (warning,) = preflight._warnings(load(path), specs)
    assert warning.startswith("the actor's config.json counts 1 layer(s) that predict several")
    assert preflight._warnings(load(path), {"actor": spec_of("mixtral")}) == []
