"""What families with experts and latent attention add: biases, dropped layers, names, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megappo.checkpoint.convert.disk_names import Piece, find
from megappo.checkpoint.convert.legacy_source import split_dim
from megappo.checkpoint.convert.torch_dist_source import TorchDistTensors
from megappo.cli import main
from megappo.models.name_map import tensor_map
from megappo.models.spec import load_spec
from tests.distributed.tiny_models import MODELS, MOE_MODELS, save_side_files, save_tiny_model

BIAS = "mlp.gate.e_score_correction_bias"
MTP_PARTS = ("embed_tokens.weight", "eh_proj.weight", "self_attn.o_proj.weight", "mlp.gate.weight")


def run(*arguments: object) -> int:
    return main(["convert", *map(str, arguments)])


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for name, settings in (MODELS | MOE_MODELS).items():
        save_tiny_model(root / name, settings)
    return root


@pytest.fixture
def with_mtp(families, tmp_path) -> Path:
    """GLM-4.5 with a layer after its three, as its releases have one."""
    folder = tmp_path / "with_mtp"
    shutil.copytree(families / "glm4_moe", folder)
    tensors = stored(folder) | {f"model.layers.3.{x}": torch.ones(4, 4) for x in MTP_PARTS}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    count_mtp(folder, 1)
    return folder


def count_mtp(folder: Path, count: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = count
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_biases_of_routers_stay_float32_whatever_dtype_is_asked_for(
    families, name, tmp_path, capsys
):
    source, wanted = families / name, ["--dtype", "bfloat16"]
    original = stored(source)
    assert sum(key.endswith(BIAS) for key in original) == 2
    assert run("to-megatron", source, tmp_path / "m", *wanted) == 0
    assert "kept       2 router biases in float32" in capsys.readouterr().out
    with TorchDistTensors(tmp_path / "m" / "release") as tensors:
        router = "decoder.layers.1.mlp.router."
        assert tensors.dtype(Piece(router + "weight")) is torch.bfloat16
        assert tensors.dtype(Piece(router + "expert_bias")) is torch.float32
    assert run("to-megatron", source, tmp_path / "f") == 0
    for checkpoint, more, told in (("m", [], "dropped"), ("f", wanted, "kept       2 router")):
        assert run("to-hf", tmp_path / checkpoint, tmp_path / "hf", "--like", source, *more) == 0
        assert (told in capsys.readouterr().out) == bool(more)
        found = stored(tmp_path / "hf")
        assert found.keys() == original.keys()
        for key, tensor in original.items():
            expected = tensor if key.endswith(BIAS) else tensor.bfloat16()
            assert found[key].dtype == expected.dtype
            assert torch.equal(found[key], expected), key
        config = json.loads((tmp_path / "hf" / "config.json").read_text())
        assert config["dtype"] == "bfloat16"
        shutil.rmtree(tmp_path / "hf")


def test_layers_that_predict_several_tokens_are_dropped_and_it_is_said(
    families, with_mtp, tmp_path, capsys
):
    rule = "dropped    4 tensors of layers that predict several tokens (MTP;"
    assert run("to-megatron", with_mtp, tmp_path / "m", "--tp", 2) == 0
    assert rule in capsys.readouterr().out
    assert run("to-hf", tmp_path / "m", tmp_path / "hf", "--like", with_mtp) == 0
    original, found = stored(families / "glm4_moe"), stored(tmp_path / "hf")
    assert found.keys() == original.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in original.items())
    before = json.loads((with_mtp / "config.json").read_text())
    after = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert after == before | {"num_nextn_predict_layers": 0}
    assert run("verify", with_mtp, tmp_path / "hf") == 0
    assert f"left out   4 tensors in {with_mtp} of" in capsys.readouterr().out


def test_a_layer_that_config_json_does_not_count_is_unknown(with_mtp, tmp_path, capsys):
    count_mtp(with_mtp, 0)
    assert run("to-megatron", with_mtp, tmp_path / "m") == 2
    said = capsys.readouterr().err
    assert all(f"model.layers.3.{part}" in said for part in MTP_PARTS)


def test_mtp_layers_of_a_megatron_checkpoint_are_dropped_only_where_the_model_counts_them(
    families, with_mtp, tmp_path, capsys
):
    """Megatron-LM's names (`mtp.layers.0…`), in the format of a file a rank."""
    like = families / "glm4_moe"
    spec = load_spec(like)
    from megappo.checkpoint.convert.checkpoint import CheckpointTensors
    from megappo.checkpoint.convert.place import find_place

    assert run("to-megatron", like, tmp_path / "m") == 0
    with CheckpointTensors(find_place(tmp_path / "m"), spec) as tensors:
        state = {name: tensors.parameter(name) for name in tensors.parameter_names()}
    state["mtp.layers.0.enorm.weight"] = torch.ones(64)
    state["mtp.layers.0.transformer_layer.mlp.experts.linear_fc1.weight0"] = torch.ones(64, 64)
    rank = tmp_path / "legacy" / "iter_0000003" / "mp_rank_00"
    rank.mkdir(parents=True)
    (tmp_path / "legacy" / "latest_checkpointed_iteration.txt").write_text("3")
    torch.save({"model": state}, rank / "model_optim_rng.pt")
    capsys.readouterr()
    assert run("to-hf", tmp_path / "legacy", tmp_path / "hf", "--like", with_mtp) == 0
    assert "dropped    2 tensors of layers that predict several" in capsys.readouterr().out
    found = stored(tmp_path / "hf")
    assert all(torch.equal(found[name], tensor) for name, tensor in stored(like).items())
    count_mtp(with_mtp, 0)
    assert run("to-hf", tmp_path / "legacy", tmp_path / "no", "--like", with_mtp) == 2
    assert "left over mtp.layers.0.enorm.weight, mtp.layers.0.tr" in capsys.readouterr().err


@pytest.mark.parametrize("name", MODELS | MOE_MODELS)
def test_files_a_rank_are_joined_over_the_dim_that_training_splits(families, name):
    table = tensor_map(load_spec(families / name), "lm")
    assert {key: split_dim(key) for key in table} == {k: e.tp_dim for k, e in table.items()}


def test_norms_within_latent_attention_are_found_under_the_names_of_either_spec():
    at = "decoder.layers.0.self_attention."
    for fused, local in (("linear_q_up_proj", "q"), ("linear_kv_up_proj", "kv")):
        name, other = f"{at}{fused}.layer_norm_weight", f"{at}{local}_layernorm.weight"
        assert find(name, {name}, joined_from_two=False) == (Piece(name),)
        assert find(name, {other}, joined_from_two=False) == (Piece(other),)


@pytest.mark.parametrize(
    ("name", "queries"),
    [
        ("deepseek_v2_lite", ("linear_q_proj",)),
        ("deepseek_v3", ("linear_q_down_proj", "linear_q_up_proj")),
    ],
)
def test_megatron_finds_the_state_and_the_arguments_of_latent_attention(
    families, name, queries, tmp_path
):
    assert run("to-megatron", families / name, tmp_path / "m") == 0
    with TorchDistTensors(tmp_path / "m" / "release") as tensors:
        objects = tensors.objects
    attention = (*queries, "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
    modules = [f"self_attention.{x}" for x in (*attention, "core_attention")]
    modules += ["input_layernorm", "pre_mlp_layernorm"]
    modules += [f"mlp.shared_experts.{x}" for x in ("linear_fc1", "linear_fc2")]
    assert {f"decoder.layers.1.{m}._extra_state/shard_0_1" for m in modules} <= objects
    from megappo.checkpoint.convert.safe_load import safe_load

    arguments = vars(safe_load(tmp_path / "m" / "release" / "common.pt")["args"])
    settings = MOE_MODELS[name]
    wanted = {
        "multi_latent_attention": True,
        "q_lora_rank": settings["q_lora_rank"],
        "kv_lora_rank": 32,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 20,
        "moe_layer_freq": [0, 1, 1],
        "moe_shared_expert_intermediate_size": 32 * settings["n_shared_experts"],
        "moe_router_enable_expert_bias": name == "deepseek_v3",
        "moe_router_score_function": "sigmoid" if name == "deepseek_v3" else "softmax",
    }
    assert {key: arguments[key] for key in wanted} == wanted


def test_a_folder_with_code_of_its_own_needs_a_flag_and_keeps_the_code(families, tmp_path, capsys):
    source, flag = tmp_path / "source", "--trust-remote-code"
    shutil.copytree(families / "deepseek_v2_lite", source)
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "code.DeepseekV2ForCausalLM"}
    (source / "config.json").write_text(json.dumps(config))
    (source / "code.py").write_text("raise RuntimeError('this code was run')")
    commands = (
        ("to-megatron", source, tmp_path / "m"),
        ("to-hf", tmp_path / "m", tmp_path / "hf", "--like", source),
        ("verify", source, tmp_path / "m"),
    )
    for command in commands:
        assert run(*command, flag) == 0
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["auto_map"] == config["auto_map"]
    assert (tmp_path / "hf" / "code.py").is_file()
    capsys.readouterr()
    for command in commands:
        assert run(*command, *(["--overwrite"] if command[0] != "verify" else [])) == 2
        assert flag in capsys.readouterr().err


def test_gemma_is_refused_with_what_megatron_lacks(tmp_path, capsys):
    source = tmp_path / "gemma"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "gemma2"}))
    save_file({"model.norm.weight": torch.ones(4)}, source / "model.safetensors")
    save_side_files(source)
    for command in (("to-megatron", source, tmp_path / "m"), ("verify", source, source)):
        assert run(*command) == 2
        said = capsys.readouterr().err
        assert "model_type 'gemma2' is not supported: Megatron-Core 0.16.1 has no norms" in said
        assert len(said.strip().splitlines()) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gemma"]
