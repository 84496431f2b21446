"""Parameters against transformers' own models, built without memory, and against model cards."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megappo.models.spec import spec_from_config
from megappo.planner.parameters import chunk_elements, layer_elements, model_elements, stages
from tests.distributed.tiny_models import COMMON, MODELS, MOE_MODELS
from tests.unit.planner.published import DEEPSEEK_V3, LLAMA_70B, QWEN3_30B_A3B


@pytest.mark.parametrize("name", [*MODELS, *MOE_MODELS])
def test_every_family_has_the_parameters_that_transformers_builds(name):
    config = AutoConfig.for_model(**(COMMON | (MODELS | MOE_MODELS)[name]))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    spec = spec_from_config(json.loads(config.to_json_string(use_diff=False)))
    assert model_elements(spec) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("config", "billions"), [(LLAMA_70B, 70.55), (DEEPSEEK_V3, 671.0), (QWEN3_30B_A3B, 30.53)]
)
def test_published_models_have_the_parameters_of_their_cards(config, billions):
    assert model_elements(spec_from_config(config)) / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize(("pp", "vp"), [(1, 1), (4, 1), (4, 2), (7, 1)])
def test_stages_hold_the_model_together_and_no_parameter_twice(pp, vp):
    spec = spec_from_config(DEEPSEEK_V3)
    found = sum(
        chunk_elements(spec, chunk, head="lm", tp=1, ep=1, etp=1).total
        for stage in stages(spec, pp=pp, vp=vp)
        for chunk in stage
    )
    assert found == model_elements(spec)


def test_ranks_hold_their_share_of_matrices_and_all_of_norms_and_routers():
    spec = spec_from_config(QWEN3_30B_A3B)
    whole = layer_elements(spec, experts=True, tp=1, ep=1, etp=1)
    part = layer_elements(spec, experts=True, tp=4, ep=8, etp=2)
    copies = 2 * 2048 + 2 * 128 + 128 * 2048
    assert part.dense == copies + (whole.dense - copies) // 4
    assert part.experts == whole.experts // 16
    assert whole.experts == 128 * 3 * 768 * 2048


def test_a_tied_model_has_a_copy_of_the_embedding_on_the_last_stage_and_a_critic_none():
    spec = spec_from_config(
        LLAMA_70B | {"tie_word_embeddings": True, "num_hidden_layers": 2, "vocab_size": 128001}
    )
    rows = 128001 + 1  # padded for TP 2
    alone = layer_elements(spec, experts=False, tp=2, ep=1, etp=2).total
    first, last = (
        chunk_elements(spec, chunk, head="lm", tp=2, ep=1, etp=2).total
        for (chunk,) in stages(spec, pp=2)
    )
    assert first == alone + rows // 2 * 8192
    assert last == alone + 8192 + rows // 2 * 8192
    (critic,) = stages(spec, pp=2)[1]
    found = chunk_elements(spec, critic, head="value", tp=2, ep=1, etp=2).total
    assert found == alone + 2 * 8192
