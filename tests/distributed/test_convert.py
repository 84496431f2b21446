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
LATENT = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}
LOADS = {
    "tp2": ("dense", 2, "--tp", "2"),
    "pp2_vp2": ("dense", 2, "--pp", "2", "--vp", "2"),
    "ep2": ("moe", 2, "--ep", "2"),
}
RUNS = {
    "tp2_latent": ("deepseek_v3", 2, ["parallel.tp=2", "parallel.sequence_parallel=true"]),
    "tp2_pp2_vp2": ("qwen2", 4, ["parallel.tp=2", "parallel.pp=2", "parallel.vpp=2"]),
    "ep2": ("qwen3_moe", 2, ["parallel.ep=2"]),
    "ep2_latent": ("deepseek_v3", 2, ["parallel.ep=2"]),
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


def compare_logits(first: Path, second: Path, *, exit_code: int) -> tuple[str, list[float]]:
    """What `verify --logits` prints, and its differences in a short and in a long prompt."""
    command = ["convert", "verify", str(first), str(second), "--logits"]
    done = subprocess.run(
        [sys.executable, "-m", "megappo.cli", *command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == exit_code, done.stderr
    found = re.search(r"difference (\S+) in a short prompt, (\S+) at the end", done.stdout)
    return done.stdout, [float(gap) for gap in found.groups()]


def test_logits_of_a_changed_checkpoint_differ_by_what_was_changed(folders, tmp_path):
    """The last norm times 1.5 makes Megatron's logits 1.5 times those of transformers."""
    from transformers import AutoModelForCausalLM

    model, changed = folders / "dense" / "qwen3", tmp_path / "changed"
    shutil.copytree(model, changed)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] *= 1.5
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    assert main(["convert", "to-megatron", str(changed), str(tmp_path / "checkpoint")]) == 0
    told, gaps = compare_logits(model, tmp_path / "checkpoint", exit_code=1)
    assert "DIFFERENT  model.norm.weight" in told
    generator = torch.Generator().manual_seed(0)
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for length, gap in zip((24, 256), gaps, strict=True):
        ids = torch.randint(VOCAB, (1, length), generator=generator)
        largest = oracle(ids).logits[0, -24:].abs().max().item()
        assert gap == pytest.approx(0.5 * largest, rel=1e-2)  # three digits are printed


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    settings = {"qwen2": {}, "qwen3_moe": {}, "deepseek_v3": LATENT}
    runs = {
        family: make_run(tmp_path_factory.mktemp(family), family=family, **more)
        for family, more in settings.items()
    }
    weights = runs["deepseek_v3"].parent / "model" / "model.safetensors"
    tensors = load_file(weights)
    for name in tensors:  # they are zero in a new model
        if name.endswith("e_score_correction_bias"):
            tensors[name] = torch.linspace(-0.2, 0.3, len(tensors[name]))
    save_file(tensors, weights, metadata={"format": "pt"})
    return runs


@pytest.mark.parametrize("layout", RUNS)
def test_what_a_run_saved_in_any_layout_exports_as_the_run_itself_does(configs, tmp_path, layout):
    family, num_ranks, overrides = RUNS[layout]
    config = configs[family]
    out = ["--config", str(config), "--out", str(tmp_path)]
    run_ranks("convert_run.py", num_ranks, *out, *overrides, timeout_s=400)
    exported = torch.load(tmp_path / "exported.pt", weights_only=True)
    model, started = config.parent / "model", load_file(config.parent / "model/model.safetensors")
    if family != "deepseek_v3":  # whose first layer is unlike the others
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
    if layout == "tp2_latent":  # parameter by parameter, with norms and biases by local names
        _, gaps = compare_logits(tmp_path / "actor_legacy", tmp_path / "legacy", exit_code=0)
        assert max(gaps) < 1e-4
