"""Megatron's FSDP against its DDP: same training, same exported weights, checkpoints of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megappo.cli import main
from tests.distributed.launch import run_ranks
from tests.distributed.tiny_models import MOE_MODELS, save_tiny_model
from tests.tiny_run import make_run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1500)]

DTYPES = ("float32", "bfloat16")
RANKS = 2
EXPERTS = "experts_cp2"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Results of a dense model over DP, and of one with experts over CP, float32, in a folder."""
    folder = tmp_path_factory.mktemp("fsdp")
    make_run(folder)
    save_tiny_model(folder / "experts", MOE_MODELS["glm4_moe"])
    start(folder, folder, *DTYPES)
    start(folder, folder / EXPERTS, "float32", "--overrides", f"model.path={folder / 'experts'}",
          "parallel.cp=2")  # fmt: skip
    return folder


def start(folder: Path, out: Path, *arguments: str) -> None:
    out.mkdir(exist_ok=True)
    run_ranks(
        "fsdp.py", RANKS, "--config", str(folder / "run.yaml"), "--out", str(out),
        "--dtypes", *arguments, timeout_s=400,
    )  # fmt: skip


def read(root: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(root / f"{name}.{r}.pt", weights_only=True) for r in range(RANKS)]


@pytest.fixture(scope="module", params=[*DTYPES, f"{EXPERTS}/float32"])
def ranks(request, root) -> list[dict[str, Any]]:
    return read(root, request.param)


@pytest.fixture(scope="module", params=DTYPES)
def errors(request, root) -> list[dict[str, str]]:
    return [rank["errors"] for rank in read(root, request.param)]


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit, and dtype for dtype."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def test_weights_are_exported_as_they_were_read(ranks):
    for rank in ranks:
        found = {n: rank["fsdp"]["untrained"][n] for n in rank["fsdp"]["bare"]}
        assert_equal(found, rank["fsdp"]["bare"])


def test_a_rank_holds_its_share_of_the_weights_alone(ranks):
    weights = ranks[0]["fsdp"]["bare"].items()
    total = sum(w.numel() for name, w in weights if not name.endswith("e_score_correction_bias"))
    held = [rank["fsdp"]["held"] for rank in ranks]
    assert sum(held) == total
    assert held == pytest.approx([total / RANKS] * RANKS, rel=0.1)


def test_training_is_that_of_ddp(ranks):
    """Sums are made in another order; bfloat16 rounds what is left of that away."""
    for rank in ranks:
        ddp, fsdp = rank["ddp"], rank["fsdp"]
        for found, expected in zip(fsdp["norms"], ddp["norms"], strict=True):
            assert found == pytest.approx(expected, rel=1e-6)
        assert fsdp["after"].keys() == ddp["after"].keys()
        for name, value in ddp["after"].items():
            assert fsdp["after"][name].dtype == value.dtype
            torch.testing.assert_close(fsdp["after"][name], value, rtol=0, atol=3e-7)
        moved = [
            (value - fsdp["saved"][name]).abs().max().item()
            for name, value in fsdp["after"].items()
        ]
        assert max(moved) > 5e-4
        torch.testing.assert_close(fsdp["new"], ddp["new"], rtol=0, atol=3e-6)


def test_all_ranks_export_the_same(ranks):
    for kind in ("untrained", "saved", "after"):
        assert_equal(ranks[1]["fsdp"][kind], ranks[0]["fsdp"][kind])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_saved_folder_has_the_exported_weights(root, dtype):
    rank = read(root, dtype)[0]
    expected = {n: w for n, w in rank["fsdp"]["after"].items() if not n.startswith("critic.")}
    assert_equal(load_file(root / dtype / "fsdp_hf" / "model.safetensors"), expected)


@pytest.mark.parametrize("target", ["fresh", "rolled_back"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_loaded_checkpoint_trains_on_bit_for_bit(ranks, kind, target):
    for rank in ranks:
        run = rank[kind]
        assert_equal(run[f"{target}_loaded"], run["saved"])
        assert run[f"{target}_lr"] == run["saved_lr"]
        assert run[f"{target}_norms"] == run["norms"][2]
        assert_equal(run[f"{target}_after"], run["after"])


@pytest.mark.parametrize("result", [*DTYPES, f"{EXPERTS}/float32"])
def test_a_checkpoint_converts_to_the_weights_that_the_run_exports(root, tmp_path, result):
    expected = read(root, result)[0]["fsdp"]["saved"]
    dtype, model = Path(result).name, root / ("experts" if EXPERTS in result else "model")
    for role, prefix in (("actor", ""), ("critic", "critic.")):
        out = tmp_path / role
        command = ["to-hf", str(root / result / "fsdp"), str(out), "--like", str(model)]
        assert main(["convert", *command, "--role", role, "--dtype", dtype]) == 0
        wanted = {
            name.removeprefix("critic."): tensor
            for name, tensor in expected.items()
            if name.startswith("critic.") == bool(prefix)
        }
        assert_equal(load_file(out / "model.safetensors"), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_file_has_whole_main_weights_and_moments(root, tmp_path, dtype):
    """Read without Megatron: weights as exported, in float32; a moment of each weight's shape."""
    rank = read(root, dtype)[0]
    file = tmp_path / "whole.pt"
    dcp_to_torch_save(root / dtype / "fsdp" / "step_000002" / "actor", file)
    whole = torch.load(file, weights_only=True)
    weights, moments = whole["model"], whole["optimizer"]["state"]
    assert {w.dtype for w in weights.values()} == {torch.float32}
    exported = rank["fsdp"]["saved"]
    for ours, theirs in (
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("decoder.layers.3.mlp.linear_fc2.weight", "model.layers.3.mlp.down_proj.weight"),
        ("decoder.final_layernorm.weight", "model.norm.weight"),
    ):
        rows = weights[ours][: len(exported[theirs])]
        assert torch.equal(rows.to(exported[theirs].dtype), exported[theirs])
    assert moments.keys() == weights.keys()
    for name, weight in weights.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert moments[name][key].shape == weight.shape
            assert moments[name][key].isfinite().all()
    assert sum(moments[name]["exp_avg_sq"].count_nonzero() for name in weights) > 0
    assert whole["scheduler"]["num_steps"] == 2


def test_a_checkpoint_after_an_unsettled_step_has_the_new_weights(ranks):
    for rank in ranks:
        assert_equal(rank["ddp"]["late_loaded"], rank["ddp"]["late"])
    assert_equal(ranks[1]["ddp"]["late"], ranks[0]["ddp"]["late"])


def test_formats_are_refused_by_each_other(errors):
    for rank in errors:
        assert "has the format fsdp_dtensor, but parallel.fsdp is false" in rank["reads_fsdp"]
        assert "set parallel.fsdp=true" in rank["reads_fsdp"]
        assert "has the format torch_dist, but parallel.fsdp is true" in rank["reads_ddp"]
        assert "set parallel.fsdp=false" in rank["reads_ddp"]


def test_a_checkpoint_of_another_model_is_refused_by_names_and_shapes(errors):
    for rank in errors:
        message = rank["another_model"]
        assert "1 other weights" in message
        assert "output_layer.weight absent -> (1, 32)" in message


def test_a_bare_chunk_below_fsdp_is_not_exported(errors):
    for rank in errors:
        assert "export the wrapper" in rank["bare_chunk"]


def test_a_save_that_fails_leaves_nothing_behind(errors):
    for rank in errors:
        assert rank["failed_save"].startswith(
            "SaveError the checkpoint of step 2 failed on rank 1: "
        )
        assert rank["left"] == "latest step_000001"


def test_room_for_weights_and_both_moments_is_looked_for_before_they_are_written(errors):
    for rank in errors:
        assert int(rank["saved_bytes"]) == 3 * 4 * int(rank["elements"])
        assert rank["full_disk"].startswith("SaveError the checkpoint of step 3 failed on rank 0: ")
        assert "has 0.5 MiB free and the checkpoint needs" in rank["full_disk"]


def test_offloaded_models_are_not_exported_and_stay_away_after_a_load(errors):
    for rank in errors:
        message = rank["export_away"]
        assert "word_embeddings.weight [261, 32] has no memory on the device" in message
        assert 'on_device("params")' in message
        assert rank["away_after_load"] == "['params', 'grads']"
