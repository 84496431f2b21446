"""Every family in every layout against transformers: outputs, gradients, exported bytes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megappo.errors import ModelError
from megappo.models import packing
from megappo.models.attention import PackedCausalAttention, group_by_length
from megappo.models.build import check_layout, chunk_layers, padded_vocab_size
from megappo.models.hf_folder import TensorFolder, write_folder
from megappo.models.name_map import canonical_name, hf_names
from megappo.models.rope import inverse_frequencies, read_rope
from megappo.models.spec import load_spec, spec_from_config
from megappo.models.weights import check_names
from tests.distributed.launch import run_ranks
from tests.distributed.tiny_models import (
    COMMON,
    LINEAR_ROPE,
    LLAMA3_ROPE,
    MODELS,
    save_tiny_model,
    sequences,
)

LAYOUTS = {
    "tp1": (1,),
    "tp2": (2, "--tp", "2"),
    "tp2_sp": (2, "--tp", "2", "--sp"),
    "pp2": (2, "--pp", "2"),
    "pp2_vp2": (2, "--pp", "2", "--vp", "2"),
    "pp2_uneven": (2, "--pp", "2", "--layers", "3", "1"),
    "cp2": (2, "--cp", "2"),
    "cp2_padded": (2, "--cp", "2", "--padded"),
    "tp2_sp_cp2": (4, "--tp", "2", "--sp", "--cp", "2"),
    "tp2_sp_padded": (2, "--tp", "2", "--sp", "--padded"),
}
VALUE_MODELS = ("llama3_rope", "qwen2_tied")


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, settings in MODELS.items():
        save_tiny_model(root / name, settings)
    return root


@pytest.fixture(scope="session")
def value_models(models, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("value_models")
    for name in VALUE_MODELS:
        shutil.copytree(models / name, root / name)
    return root


def loss_weights(number: int, length: int) -> torch.Tensor:
    """As in the worker: one weight a token by its sequence and position alone."""
    return 1.0 + number - 2.0 * torch.arange(length) / length


def oracle(folder: Path, *, value_weight: torch.Tensor | None = None):
    """Outputs and gradients by transformers, one unpadded sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config._attn_implementation = "eager"
    head = None if value_weight is None else value_weight.clone().requires_grad_()
    outputs = []
    for micro_batch in (sequences()[:3], sequences()[3:]):
        for number, ids in enumerate(micro_batch):
            here = loss_weights(number, len(ids))
            if head is None:
                out = model(ids[None]).logits[0]
                log_p = out.log_softmax(-1)
                targets = torch.cat([ids[1:], ids.new_zeros(1)])
                entropy = -(log_p.exp() * log_p).sum(-1)
                per_token = log_p.gather(-1, targets[:, None])[:, 0] + 0.3 * entropy
            else:
                out = per_token = (model.model(ids[None]).last_hidden_state[0] @ head.T)[:, 0]
            (per_token * here).sum().backward()
            outputs.append(out.detach())
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    if head is not None:
        gradients["score.weight"] = head.grad
    return torch.cat(outputs), gradients


def assert_close_in_scale(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def norm(gradients: dict[str, torch.Tensor]) -> float:
    return torch.cat([g.flatten() for g in gradients.values()]).norm().item()


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as f:
            assert f.metadata() == {"format": "pt"}
            tensors |= {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    return tensors


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_gradients_equal_transformers_and_export_is_exact(models, layout, tmp_path):
    num_ranks, *flags = LAYOUTS[layout]
    run_ranks("parity.py", num_ranks, "--models", str(models), "--out", str(tmp_path), *flags)
    for name in MODELS:
        result = torch.load(tmp_path / name / "result.pt")
        outputs, gradients = oracle(models / name)
        assert (torch.cat(result["outputs"]) - outputs).abs().max() < 1e-4
        assert result["norm"] == pytest.approx(norm(gradients), rel=1e-5)
        assert result["gradients"].keys() == gradients.keys()
        for parameter, expected in gradients.items():
            assert_close_in_scale(result["gradients"][parameter], expected, 2e-5)
        before, after = stored(models / name), stored(tmp_path / name / "saved")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[n], after[n]) for n in before)


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["tp1", "tp2", "tp2_sp", "pp2"])
def test_values_and_value_gradients_equal_a_linear_head_on_transformers(
    value_models, layout, tmp_path
):
    num_ranks, *flags = LAYOUTS[layout]
    where = ("--models", str(value_models), "--out", str(tmp_path), "--head", "value")
    run_ranks("parity.py", num_ranks, *where, *flags)
    for name in VALUE_MODELS:
        result = torch.load(tmp_path / name / "result.pt")
        saved = stored(tmp_path / name / "saved")
        expected_head = torch.randn(1, 64, generator=torch.Generator().manual_seed(5)) * 0.3
        assert torch.equal(saved["score.weight"], expected_head)
        outputs, gradients = oracle(
            value_models / name,
            value_weight=expected_head,
        )
        gradients.pop("lm_head.weight", None)
        assert (torch.cat(result["outputs"])[:, 0] - outputs).abs().max() < 1e-4
        assert result["outputs"][0].dtype == torch.float32
        assert result["norm"] == pytest.approx(norm(gradients), rel=1e-5)
        assert result["gradients"].keys() == gradients.keys() == saved.keys()
        for parameter, expected in gradients.items():
            assert_close_in_scale(result["gradients"][parameter], expected, 2e-5)


@pytest.mark.distributed
def test_saved_critic_loads_as_sequence_classifier_and_again_as_critic(models, tmp_path):
    from transformers import AutoModelForSequenceClassification

    (tmp_path / "source").mkdir()
    shutil.copytree(models / "qwen3", tmp_path / "source" / "qwen3")
    first, second = tmp_path / "first", tmp_path / "second"
    for source, out in ((tmp_path / "source", first), (first / "critics", second)):
        run_ranks("parity.py", 1, "--models", str(source), "--out", str(out), "--head", "value")
        (out / "critics").mkdir()
        (out / "qwen3" / "saved").rename(out / "critics" / "qwen3")
    before, after = stored(first / "critics" / "qwen3"), stored(second / "critics" / "qwen3")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    model = AutoModelForSequenceClassification.from_pretrained(first / "critics" / "qwen3")
    assert torch.equal(model.score.weight, before["score.weight"])


@pytest.mark.distributed
def test_recomputing_activations_changes_nothing(models, tmp_path):
    one = tmp_path / "models"
    one.mkdir()
    shutil.copytree(models / "qwen3", one / "qwen3")
    results = []
    for mode in ("none", "selective", "full"):
        out = tmp_path / mode
        run_ranks("parity.py", 1, "--models", str(one), "--out", str(out), "--recompute", mode)
        results.append(torch.load(out / "qwen3" / "result.pt")["gradients"])
    for other in results[1:]:
        assert all(torch.equal(results[0][n], other[n]) for n in results[0])


@pytest.mark.distributed
def test_saved_folder_is_complete_and_loads_alone(models, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    one = tmp_path / "models"
    one.mkdir()
    shutil.copytree(models / "llama_tied", one / "llama_tied")
    run_ranks("parity.py", 1, "--models", str(one), "--out", str(tmp_path / "out"))
    saved = tmp_path / "out" / "llama_tied" / "saved"
    side = {"tokenizer.json", "chat_template.jinja", "LICENSE", "generation_config.json"}
    for name in side:
        assert (saved / name).read_bytes() == (models / "llama_tied" / name).read_bytes()
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    shards = sorted(saved.glob("*.safetensors"))
    assert len(shards) > 1
    assert set(index["weight_map"].values()) == {s.name for s in shards}
    tensors = stored(saved)
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tensors.values())
    assert {p.name for p in saved.iterdir()} == side | {
        "config.json",
        "model.safetensors.index.json",
        *(s.name for s in shards),
    }
    model, report = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.tie_word_embeddings
    assert AutoTokenizer.from_pretrained(saved).chat_template == "{{ messages[0]['content'] }}"


def test_a_folder_is_never_overwritten(models, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="exists"):
        write_folder([], models / "qwen3", tmp_path / "out")


def test_expected_names_and_shapes_are_those_of_the_folder(models):
    for name in MODELS:
        with TensorFolder(models / name) as tensors:
            found = {n: tensors.shape(n) for n in tensors.names()}
        assert hf_names(load_spec(models / name)) == found


def test_local_and_transformer_engine_names_are_one():
    norm = "decoder.layers.5.self_attention.linear_qkv.layer_norm_weight"
    assert canonical_name("decoder.layers.1.input_layernorm.weight", 4) == norm
    assert canonical_name("decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", 4) == norm
    assert (
        canonical_name("decoder.layers.0.pre_mlp_layernorm.weight", 0)
        == "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
    )
    assert canonical_name("output_layer.weight", 4) == "output_layer.weight"


@pytest.mark.parametrize("name", MODELS)
def test_spec_agrees_with_transformers(models, name):
    from transformers import AutoConfig

    spec, config = load_spec(models / name), AutoConfig.from_pretrained(models / name)
    assert spec.tied == config.tie_word_embeddings
    assert spec.num_kv_heads == config.num_key_value_heads == 2
    assert spec.head_dim == (getattr(config, "head_dim", None) or 16)
    assert spec.dtype == "float32"
    assert (spec.qkv_bias, spec.qk_norm) == (name == "qwen2_tied", name == "qwen3")


@pytest.mark.parametrize(
    "rope", [{"rope_type": "default", "rope_theta": 1e6}, LINEAR_ROPE, LLAMA3_ROPE]
)
def test_rope_frequencies_equal_transformers_in_both_spellings(rope):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=dict(rope))
    expected = LlamaRotaryEmbedding(config).inv_freq
    old = {"rope_theta": rope["rope_theta"]}
    if rope["rope_type"] != "default":
        old["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    for spelling in ({"rope_parameters": rope}, old):
        assert torch.equal(inverse_frequencies(read_rope(spelling), 128), expected)


def config_json(model_type: str, **settings) -> dict:
    return COMMON | {"model_type": model_type, "tie_word_embeddings": False} | settings


REFUSED = {
    "llama attention bias": (config_json("llama", attention_bias=True), "attention_bias=True"),
    "llama mlp bias": (config_json("llama", mlp_bias=True), "mlp_bias=True"),
    "another activation": (config_json("llama", hidden_act="gelu"), "'gelu'"),
    "partial rotary": (
        config_json("llama", partial_rotary_factor=0.5),
        "partial_rotary_factor=0.5",
    ),
    "partial rotary inside": (
        config_json("llama", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25}),
        "partial_rotary_factor=0.25",
    ),
    "softcap": (config_json("llama", final_logit_softcapping=30.0), "final_logit_softcapping=30.0"),
    "yarn": (
        config_json("qwen2", rope_scaling={"type": "yarn", "factor": 4.0}),
        "'yarn' takes exactly the parameters",
    ),
    "dynamic": (
        config_json("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
        "'dynamic'",
    ),
    "llama3 without a number": (
        config_json("llama", rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        "takes exactly the parameters",
    ),
    "two thetas": (
        config_json("llama", rope_theta=5e5, rope_parameters={"rope_theta": 1e4}),
        "twice and differently",
    ),
    "quantized": (config_json("llama", quantization_config={"bits": 4}), "quantized"),
    "qwen2 window": (
        config_json("qwen2", use_sliding_window=True, sliding_window=128, max_window_layers=2),
        "128 tokens while max_position_embeddings is 256",
    ),
    "qwen3 layer types": (
        config_json("qwen3", head_dim=16, layer_types=["full_attention", "sliding_attention"]),
        "sliding_attention",
    ),
    "qwen3 attention bias": (
        config_json("qwen3", head_dim=16, attention_bias=True),
        "attention_bias=True",
    ),
    "qwen3 without head dim": (config_json("qwen3"), "lacks head_dim"),
    "mistral window": (config_json("mistral", sliding_window=64), "64 tokens"),
    "mistral default window": (
        config_json("mistral", max_position_embeddings=32768),
        "4096 tokens while max_position_embeddings is 32768",
    ),
    "no kv heads": (config_json("mistral", num_key_value_heads=None), "lacks num_key_value_heads"),
    "uneven kv heads": (config_json("llama", num_key_value_heads=3), "4 and 3"),
    "missing field": (config_json("llama", rms_norm_eps=None), "lacks rms_norm_eps"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_that_would_change_the_model_is_refused(case):
    config, message = REFUSED[case]
    with pytest.raises(ModelError, match=message.replace("(", r"\(")):
        spec_from_config(config)


def test_settings_without_effect_are_accepted():
    for config in (
        config_json("llama", pretraining_tp=2, use_cache=True, attention_dropout=0.1),
        config_json("qwen2", use_sliding_window=False, sliding_window=64, use_mrope=False),
        config_json("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=4),
        config_json("mistral", sliding_window=None),
        config_json("mistral", sliding_window=256),
    ):
        assert spec_from_config(config).num_layers == 4


def test_a_folder_with_missing_parts_says_which(models, tmp_path):
    with pytest.raises(ModelError, match="nowhere does not exist"):
        load_spec(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_spec(tmp_path)
    shutil.copyfile(models / "qwen3" / "config.json", tmp_path / "config.json")
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        load_spec(tmp_path)
    index = {"weight_map": {"a": "x.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"not there: x\.safetensors"):
        load_spec(tmp_path)
    (tmp_path / "x.safetensors").touch()
    with pytest.raises(ModelError, match="no tokenizer"):
        load_spec(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    assert load_spec(tmp_path).qk_norm


def test_an_unknown_family_lists_the_known_ones(models, tmp_path):
    folder = shutil.copytree(models / "qwen3", tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(config_json("qwen4")))
    with pytest.raises(ModelError, match=r"'qwen4'.*known: .*llama, mistral, mixtral, qwen2"):
        load_spec(folder)


def test_code_in_the_folder_needs_trust(models, tmp_path):
    folder = shutil.copytree(models / "llama_tied", tmp_path / "model")
    config = config_json("llama", auto_map={"AutoModel": "m.M"})
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="trust_remote_code=true"):
        load_spec(folder)
    assert load_spec(folder, trust_remote_code=True).model_type == "llama"


def test_layouts_that_do_not_divide_are_refused_with_the_numbers(models):
    spec = load_spec(models / "qwen3")
    check_layout(spec, tp=2, pp=2, vp=2)
    with pytest.raises(ModelError, match=r"key-value heads .*: 2 over 4"):
        check_layout(spec, tp=4, pp=1)
    with pytest.raises(ModelError, match=r"query heads .*: 4 over 3"):
        check_layout(spec, tp=3, pp=1)
    with pytest.raises(ModelError, match=r"4 layers do not fill 6 pipeline chunks"):
        check_layout(spec, tp=1, pp=3, vp=2)
    with pytest.raises(ModelError, match=r"\[3, 2\] must be 2 counts .* the model's 4 layers"):
        check_layout(spec, tp=1, pp=2, pipeline_layers=[3, 2])


@pytest.mark.parametrize(
    ("num_layers", "pp", "vp", "expected"),
    [
        (4, 2, 1, (2, 2)),
        (5, 2, 1, (3, 2)),
        (7, 3, 1, (2, 3, 2)),
        (10, 2, 2, (2, 3, 3, 2)),
        (11, 2, 2, (3, 3, 3, 2)),
        (3, 1, 1, (3,)),
    ],
)
def test_layers_left_over_go_to_the_middle_first_and_to_the_head_last(num_layers, pp, vp, expected):
    assert chunk_layers(num_layers, pp=pp, vp=vp) == expected


def test_vocabulary_is_padded_to_a_multiple_of_the_ranks():
    assert [padded_vocab_size(131, tp=n) for n in (1, 2, 4)] == [131, 132, 132]
    assert padded_vocab_size(128, tp=4) == 128


def test_packing_pads_with_one_extra_sequence():
    packed = packing.pack([[5, 6, 7], [8, 9]], packing.Alignment(multiple_of=4))
    assert packed.tokens.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0]]
    assert packed.labels.tolist() == [[6, 7, 0, 9, 0, 0, 0, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert packed.segments.tolist() == [[1, 1, 1, 2, 2, 0, 0, 0]]
    assert (packed.lengths, packed.starts) == ((3, 2, 3), (0, 3, 5))
    assert (packed.max_seqlen, packed.num_sequences) == (3, 2)
    assert packing.last_tokens(packed, torch.arange(8.0)).tolist() == [2, 4]
    empty = packing.pack([], packing.Alignment(multiple_of=2))
    assert (empty.tokens.tolist(), empty.num_sequences) == ([[0, 0]], 0)
    assert packing.pack([]).tokens.tolist() == [[0]]


def test_padding_brings_every_sequence_to_the_longest():
    align = packing.Alignment(multiple_of=4, packed=False)
    packed = packing.pack([[5, 6, 7], [8, 9]], align)
    assert packed.tokens.tolist() == [[5, 6, 7, 0], [8, 9, 0, 0]]
    assert packed.labels.tolist() == [[6, 7, 0, 0], [9, 0, 0, 0]]
    assert packed.segments.tolist() == [[1, 1, 1, 0], [2, 2, 0, 0]]
    assert packing.packed_seq_params(packed) is None
    assert packing.last_tokens(packed, torch.arange(8.0)).tolist() == [2, 5]


def test_under_context_parallelism_each_rank_has_an_early_and_a_late_chunk_of_each_sequence():
    """Labels are shifted before the split: each rank's last label is the next rank's token."""
    ids = [[1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13]]
    ranks = [packing.pack(ids, packing.Alignment(cp=2, cp_rank=r)) for r in range(2)]
    assert [p.tokens.tolist() for p in ranks] == [[[1, 2, 7, 8, 11, 0]], [[3, 4, 5, 6, 12, 13]]]
    assert [p.labels.tolist() for p in ranks] == [[[2, 3, 8, 0, 12, 0]], [[4, 5, 6, 7, 13, 0]]]
    assert ranks[0].position_ids.tolist() == [[0, 1, 6, 7, 0, 3]]
    assert ranks[0].lengths == (8, 4)
    ends = [packing.last_tokens(p, torch.ones(6)).tolist() for p in ranks]
    assert ends == [[1, 0], [0, 1]]
    # With sequence parallelism too, the tokens of a rank divide over TP.
    wide = packing.pack(ids, packing.Alignment(cp=2, multiple_of=4))
    assert (wide.total_tokens, wide.lengths) == (8, (8, 4, 4))


def test_responses_are_read_where_they_are_predicted():
    lengths = {"prompt_lengths": [2, 1, 3], "response_lengths": [2, 3, 0]}
    positions, samples, steps = packing.response_positions([0, 4, 8], **lengths)
    # Rows: p p r r | p r r r | p p p
    assert positions.tolist() == [1, 2, 4, 5, 6]
    assert samples.tolist() == [0, 0, 1, 1, 1]
    assert steps.tolist() == [0, 1, 0, 1, 2]
    packed = packing.pack([[9] * 4, [9] * 4, [9] * 3])
    index = packing.response_index(packed, **lengths, width=4)
    assert index.owned.tolist() == [[True, True, False, False], [True] * 3 + [False], [False] * 4]
    flat = torch.arange(11.0, requires_grad=True)
    out = index.scatter(flat)
    assert out.tolist() == [[1, 2, 0, 0], [4, 5, 6, 0], [0, 0, 0, 0]]
    out.sum().backward()
    assert flat.grad.tolist() == [0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0]


def test_over_context_parallel_ranks_each_response_token_is_owned_once():
    ids = [list(range(1, n + 1)) for n in (9, 3, 14)]
    lengths = {"prompt_lengths": [4, 1, 2], "response_lengths": [5, 2, 12]}
    owned, found = torch.zeros(3, 12, dtype=torch.int), torch.zeros(3, 12)
    for rank in range(3):
        packed = packing.pack(ids, packing.Alignment(cp=3, cp_rank=rank))
        index = packing.response_index(packed, **lengths, width=12)
        owned += index.owned
        found += index.scatter(packed.labels[0].float())
    whole = packing.pack(ids)
    expected = packing.response_index(whole, **lengths, width=12).scatter(whole.labels[0].float())
    assert torch.equal(found, expected)
    assert owned.sum(1).tolist() == [5, 2, 12]
    assert owned.max() == 1


def test_weights_that_do_not_fit_the_model_are_named(models, tmp_path):
    from safetensors.torch import save_file

    folder = shutil.copytree(models / "qwen3", tmp_path / "model")
    spec, tensors = load_spec(folder), stored(folder)
    tensors["model.layers.4.extra.weight"] = tensors.pop("model.layers.2.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    with TensorFolder(folder) as source, pytest.raises(ModelError) as error:
        check_names(source, spec, "lm")
    assert "missing model.layers.2.mlp.up_proj.weight; unknown model.layers.4.extra.weight" in str(
        error.value
    )


def test_a_tensor_of_another_shape_is_named_with_both_shapes(models):
    spec = load_spec(models / "qwen3")
    with (
        TensorFolder(models / "qwen3") as source,
        pytest.raises(ModelError, match=r"shape \[131, 64\], but this model needs \[132, 64\]"),
    ):
        check_names(source, replace(spec, vocab_size=132), "lm")


def test_a_critic_may_start_from_a_language_model_but_an_actor_not_without_its_head(models):
    spec = load_spec(models / "llama_tied")
    with TensorFolder(models / "llama_tied") as source:
        assert "score.weight" not in check_names(source, spec, "value")
        with pytest.raises(ModelError, match=r"missing lm_head\.weight"):
            check_names(source, replace(spec, tied=False), "lm")


def test_only_sequences_of_similar_length_are_padded_together():
    # 10^2 + 10^2 + 9^2 fill 0.937 of 3 x 10^2; adding 4^2 would fill 0.74 of 4 x 10^2.
    assert group_by_length([10, 4, 10, 9, 4]) == [[0, 2, 3], [1, 4]]


def test_packed_attention_equals_a_masked_softmax_over_each_sequence():
    from types import SimpleNamespace

    generator = torch.Generator().manual_seed(1)
    lengths, scale = [5, 1, 5, 4], 8**-0.5
    query, key, value = (torch.randn(15, n, 8, generator=generator) for n in (4, 2, 2))
    tensors = [x.requires_grad_() for x in (query, key, value)]
    config = SimpleNamespace(context_parallel_size=1, attention_dropout=0.0)
    starts = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 5, 6, 11, 15]))
    out = PackedCausalAttention(config=config)(*tensors, None, packed_seq_params=starts)
    gradients = torch.autograd.grad(out.square().sum(), tensors)
    sequence = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    allowed = (sequence[:, None] == sequence) & torch.ones(15, 15).tril().bool()
    wide_key, wide_value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, wide_key) * scale
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, wide_value).flatten(1)
    assert (out - expected).abs().max() < 1e-6
    wanted = torch.autograd.grad(expected.square().sum(), tensors)
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(gradients, wanted, strict=True))
