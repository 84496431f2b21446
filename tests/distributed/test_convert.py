"""Real Megatron loads what is converted, and what it saves is converted, in any layout."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megappo.checkpoint.convert.torch_dist_source import TorchDistTensors
from megappo.cli import main
from tests.distributed.launch import run_ranks
from tests.distributed.tiny_models import MODELS, MOE_MODELS, VOCAB, save_tiny_model
from tests.tiny_run import make_run

pytestmark = pytest.mark.distributed

DENSE = ("llama_tied", "qwen2_tied", "qwen3")
LOADS = {
    "tp2": ("dense", 2, "--tp", "2"),
    "pp2_vp2": ("dense", 2, "--pp", "2", "--vp", "2"),
    "ep2": ("moe", 2, "--ep", "2"),
}
RUNS = {
    "tp2": ("qwen2", 2, ["parallel.tp=2"]),
    "tp2_pp2": ("qwen2", 4, ["parallel.tp=2", "parallel.pp=2"]),
    "pp2_vp2": ("qwen2", 2, ["parallel.pp=2", "parallel.vpp=2"]),
    "ep2": ("qwen3_moe", 2, ["parallel.ep=2"]),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """`dense/` and `moe/` with models, and `dense_cut/` and `moe_cut/` with their checkpoints."""
    root = tmp_path_factory.mktemp("convert")
    for group, names, cut in (
        ("dense", DENSE, ["--tp", "2", "--pp", "2"]),
        ("moe", tuple(MOE_MODELS), ["--tp", "2", "--ep", "2"]),
    ):
        for name in names:
            save_tiny_model(root / group / name, (MODELS | MOE_MODELS)[name])
            out = root / f"{group}_cut" / name
            assert main(["convert", "to-megatron", str(root / group / name), str(out), *cut]) == 0
    return root


@pytest.mark.parametrize("layout", LOADS)
def test_megatron_loads_a_converted_checkpoint_in_layouts_it_was_not_cut_for(folders, layout):
    group, num_ranks, *flags = LOADS[layout]
    where = ("--models", str(folders / group), "--checkpoints", str(folders / f"{group}_cut"))
    run_ranks("convert_load.py", num_ranks, *where, *flags, timeout_s=400)


def test_logits_of_a_changed_checkpoint_differ_by_what_was_changed(folders, tmp_path):
    """The last norm times 1.5 makes Megatron's logits 1.5 times those of transformers."""
    from transformers import AutoModelForCausalLM

    model, changed = folders / "dense" / "qwen3", tmp_path / "changed"
    shutil.copytree(model, changed)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] *= 1.5
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    assert main(["convert", "to-megatron", str(changed), str(tmp_path / "checkpoint")]) == 0
    command = ["convert", "verify", str(model), str(tmp_path / "checkpoint"), "--logits"]
    done = subprocess.run(
        [sys.executable, "-m", "megappo.cli", *command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "DIFFERENT  model.norm.weight" in done.stdout
    found = re.search(r"difference (\S+) in a short prompt, (\S+) at the end", done.stdout)
    generator = torch.Generator().manual_seed(0)
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for length, gap in zip((24, 256), found.groups(), strict=True):
        ids = torch.randint(VOCAB, (1, length), generator=generator)
        largest = oracle(ids).logits[0, -24:].abs().max().item()
        assert float(gap) == pytest.approx(0.5 * largest, rel=1e-2)  # three digits are printed


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    return {
        family: make_run(tmp_path_factory.mktemp(family), family=family)
        for family in ("qwen2", "qwen3_moe")
    }


@pytest.mark.parametrize("layout", RUNS)
def test_what_a_run_saved_in_any_layout_exports_as_the_run_itself_does(configs, tmp_path, layout):
    family, num_ranks, overrides = RUNS[layout]
    config = configs[family]
    out = ["--config", str(config), "--out", str(tmp_path)]
    run_ranks("convert_run.py", num_ranks, *out, *overrides, timeout_s=400)
    exported = torch.load(tmp_path / "exported.pt", weights_only=True)
    model, started = config.parent / "model", load_file(config.parent / "model/model.safetensors")
    with TorchDistTensors(tmp_path / "megatron_lm" / "iter_0000007") as tensors:
        assert "decoder.layers.self_attention.linear_qkv.weight" in tensors.keys
    for role, source in (
        ("actor", tmp_path),
        ("critic", tmp_path),
        ("actor", tmp_path / "legacy"),
        ("actor", tmp_path / "megatron_lm"),
    ):
        result = tmp_path / f"{role}_{source.name}"
        command = ["convert", "to-hf", str(source), str(result), "--like", str(model)]
        assert main([*command, "--role", role]) == 0
        found = load_file(result / "model.safetensors")
        assert found.keys() == exported[role].keys()
        for name, tensor in exported[role].items():
            assert torch.equal(found[name], tensor), (role, source, name)
        assert not torch.equal(found["model.norm.weight"], started["model.norm.weight"])
