"""Where a parameter may stand on disk, by literal names of Megatron's versions and specs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megappo.checkpoint.convert.checkpoint import CheckpointTensors
from megappo.checkpoint.convert.disk_names import Piece, find
from megappo.checkpoint.convert.place import find_place
from megappo.cli import main
from megappo.errors import CheckpointError
from megappo.models.spec import load_spec
from tests.distributed.tiny_models import MOE_MODELS, save_tiny_model

FC1 = "decoder.layers.3.mlp.experts.linear_fc1.weight5"


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("decoder.layers.3.mlp.linear_fc2.weight", ["decoder.layers.mlp.linear_fc2.weight"], [3]),
        ("decoder.layers.3.mlp.linear_fc2.weight", ["decoder.layers.3.mlp.linear_fc2.weight"], []),
        (
            "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight",
            ["decoder.layers.3.input_layernorm.weight"],
            [],
        ),
        (
            "decoder.layers.3.mlp.linear_fc1.layer_norm_weight",
            ["decoder.layers.pre_mlp_layernorm.weight"],
            [3],
        ),
        (
            "decoder.layers.3.pre_mlp_layernorm.weight",
            ["decoder.layers.3.mlp.linear_fc1.layer_norm_weight"],
            [],
        ),
        (FC1, ["decoder.layers.mlp.experts.experts.linear_fc1.weight"], [3, 5]),
        (FC1, ["decoder.layers.3.mlp.experts.experts.linear_fc1.weight"], [5]),
        (FC1, ["decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight"], []),
        (FC1, [FC1], []),
        (
            FC1,
            [
                "decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight_w",
                "decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight_v",
            ],
            [],
        ),
    ],
)
def test_a_parameter_is_found_under_each_of_its_names(name, keys, expected):
    found = find(name, {*keys, "decoder.final_layernorm.weight"}, joined_from_two="fc1" in name)
    assert found == tuple(Piece(key, tuple(expected)) for key in keys)


def test_a_parameter_that_is_not_there_or_there_twice():
    name = "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
    assert find(name, {"decoder.layers.1.pre_mlp_layernorm.weight"}, joined_from_two=False) is None
    both = {"decoder.layers.0.pre_mlp_layernorm.weight", name}
    with pytest.raises(CheckpointError, match="twice"):
        find(name, both, joined_from_two=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("legacy") / "model"
    save_tiny_model(folder, MOE_MODELS["qwen3_moe"])
    return folder


def write_ranks(model: Path, out: Path, *, tp: int, ep: int) -> None:
    """Files of TP x EP ranks with Transformer Engine's names, cut by hand."""
    checkpoint = out / "whole"
    assert main(["convert", "to-megatron", str(model), str(checkpoint)]) == 0
    spec = load_spec(model)
    with CheckpointTensors(find_place(checkpoint), spec) as tensors:
        whole = {name: tensors.parameter(name) for name in tensors.parameter_names()}
    local = spec.num_experts // ep
    for t in range(tp):
        for e in range(ep):
            state: dict[str, Any] = {}
            for name, tensor in whole.items():
                base = name.rstrip("0123456789")
                if ".experts.linear_fc" in name:
                    expert = int(name[len(base) :])
                    if expert // local != e:
                        continue
                    name = f"{base}{expert % local}"
                state[name] = shard(base, tensor, t, tp)
            arguments = Namespace(
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=1,
                expert_model_parallel_size=ep,
                untie_embeddings_and_output_weights=True,
            )
            folder = out / "legacy" / f"mp_rank_{t:02d}_{e:03d}"
            folder.mkdir(parents=True)
            torch.save({"args": arguments, "model": state}, folder / "model_optim_rng.pt")


def shard(base: str, tensor: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    if base.endswith("linear_fc1.weight"):
        gate, up = tensor.chunk(2)
        return torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]])
    if base.endswith(("linear_qkv.weight", "embeddings.weight", "output_layer.weight")):
        return tensor.chunk(tp)[rank].clone()
    if base.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return tensor.chunk(tp, dim=1)[rank].clone()
    return tensor.clone()


def test_legacy_files_of_tp_and_ep_ranks_with_transformer_engines_names(model, tmp_path, capsys):
    write_ranks(model, tmp_path, tp=2, ep=2)
    legacy = tmp_path / "legacy"
    command = ["convert", "to-hf", str(legacy), str(tmp_path / "hf"), "--like", str(model)]
    assert main(command) == 0
    found, expected = (load_file(f / "model.safetensors") for f in (tmp_path / "hf", model))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    capsys.readouterr()
    assert main(["convert", "inspect", str(legacy)]) == 0
    assert "layout     tp 2, pp 1, ep 2" in capsys.readouterr().out
    (legacy / "mp_rank_01_001" / "model_optim_rng.pt").rename(tmp_path / "lost.pt")
    assert main([*command, "--overwrite"]) == 2
    assert "mp_rank_01_001 have no model_optim_rng.pt" in capsys.readouterr().err
    (legacy / "mp_rank_01_001").rmdir()
    assert main([*command, "--overwrite"]) == 2
    assert "1 of 2 x 1 x 2 (TP x PP x EP) ranks are missing" in capsys.readouterr().err
