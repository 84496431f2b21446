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
from megappo.checkpoint.convert.torch_dist_source import TorchDistTensors
from megappo.checkpoint.convert.torch_dist_writer import DistcpFiles, write_metadata
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


def test_chunks_that_span_layers_are_read_like_those_of_one(tmp_path):
    """Another writer may put several layers into one chunk, or cut columns."""
    import torch.distributed.checkpoint as dcp

    stack = torch.arange(3 * 4 * 6, dtype=torch.float32).reshape(3, 4, 6)
    dcp.save({"decoder.layers.x": stack.clone()}, checkpoint_id=str(tmp_path), no_dist=True)
    with TorchDistTensors(tmp_path) as tensors:
        for layer in range(3):
            found = tensors.read(Piece("decoder.layers.x", (layer,)), 1, 3)
            assert torch.equal(found, stack[layer, 1:3])
        assert torch.equal(tensors.read(Piece("decoder.layers.x"), 1, 3), stack[1:])


def test_chunks_by_columns_and_rows_are_put_together(tmp_path):
    whole = torch.arange(48, dtype=torch.float32).reshape(6, 8)
    with DistcpFiles(tmp_path, 0) as files:
        for slot, rows, columns in ((0, 0, 0), (1, 0, 5), (0, 4, 0), (1, 4, 5)):
            box = whole[rows : rows + 4, columns : columns + 5][: 6 - rows, : 8 - columns]
            files.add(slot, "a", (6, 8), (rows, columns), box)
        files.add(0, "scalar", (), (), torch.tensor(7.0))
    write_metadata(tmp_path, files.written, {})
    with TorchDistTensors(tmp_path) as tensors:
        assert torch.equal(tensors.read(Piece("a"), 0, 6), whole)
        assert torch.equal(tensors.read(Piece("a"), 3, 5), whole[3:5])
        assert tensors.read(Piece("scalar"), 0, 1) == 7.0


def test_a_tensor_that_is_stored_transposed_is_read_by_its_strides(tmp_path):
    import torch.distributed.checkpoint as dcp

    turned = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).T
    dcp.save({"a": turned}, checkpoint_id=str(tmp_path), no_dist=True)
    with TorchDistTensors(tmp_path) as tensors:
        assert torch.equal(tensors.read(Piece("a"), 1, 4), turned[1:4])
