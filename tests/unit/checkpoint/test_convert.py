"""Round trips of every family, what the written files hold, and every way it can go wrong."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megappo.checkpoint.convert.torch_dist_source import TorchDistTensors
from megappo.cli import main
from tests.distributed.tiny_models import (
    COMMON,
    MODELS,
    MOE_MODELS,
    VOCAB,
    save_side_files,
    save_tiny_model,
)

ALL_MODELS = MODELS | MOE_MODELS


def write_model(folder: Path, **changes: Any) -> None:
    """A Qwen2 folder with random weights, without transformers, which takes seconds to import."""
    config = {
        **COMMON,
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "dtype": "bfloat16",
    } | changes
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    rows = {"q": hidden, "k": hidden // 2, "v": hidden // 2}
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    shapes["model.norm.weight"] = (hidden,)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for x, n in rows.items():
            shapes[f"{at}self_attn.{x}_proj.weight"] = (n, hidden)
            shapes[f"{at}self_attn.{x}_proj.bias"] = (n,)
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, hidden)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{name}.weight"] = (hidden,)
        shapes[f"{at}mlp.gate_proj.weight"] = shapes[f"{at}mlp.up_proj.weight"] = (wide, hidden)
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, wide)
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_side_files(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("convert") / "model"
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(model) -> Path:
    out = model.parent / "checkpoint"
    assert main(["convert", "to-megatron", str(model), str(out)]) == 0
    return out


def run(*arguments: object) -> int:
    return main(["convert", *map(str, arguments)])


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_same_bits(first: Path, second: Path) -> None:
    a, b = stored(first), stored(second)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype
        assert tensor.shape == b[name].shape
        flat = [t.flatten().view(torch.uint8) for t in (tensor, b[name])]
        assert torch.equal(*flat), name


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for name, settings in ALL_MODELS.items():
        save_tiny_model(root / name, settings)
    return root


@pytest.mark.parametrize("name", ALL_MODELS)
def test_every_family_comes_back_bit_for_bit_and_loads_in_transformers(
    families, name, tmp_path, capsys
):
    """Cut for more TP ranks than there are key-value heads, as Megatron allows it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, cut = families / name, ["--tp", 4, "--pp", 2]
    if name in MOE_MODELS:
        cut += ["--ep", 2]
    assert run("to-megatron", source, tmp_path / "m", *cut) == 0
    assert run("to-hf", tmp_path / "m", tmp_path / "hf", "--like", source) == 0
    assert_same_bits(source, tmp_path / "hf")
    capsys.readouterr()
    assert run("verify", source, tmp_path / "m") == 0
    count = len(stored(source))
    assert f"{count} of {count} tensors are equal" in capsys.readouterr().out
    assert run("inspect", tmp_path / "m") == 0
    assert "  embedding.word_embeddings.weight [512, 64] float32" in capsys.readouterr().out
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name != "config.json":
            assert (tmp_path / "hf" / path.name).read_bytes() == path.read_bytes()
    config, written = (
        json.loads((x / "config.json").read_text()) for x in (source, tmp_path / "hf")
    )
    if "num_nextn_predict_layers" in config:  # transformers' default is 1, and it keeps none
        config["num_nextn_predict_layers"] = 0
    assert written == config
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.get_chat_template() == "{{ messages[0]['content'] }}"


def test_a_group_of_heads_is_queries_then_key_then_value(model, tmp_path):
    """4 query and 2 key-value heads: q0 q1 k0 v0 q2 q3 k1 v1."""
    assert run("to-megatron", model, tmp_path / "m", "--tp", 2) == 0
    hf = stored(model)
    with TorchDistTensors(tmp_path / "m" / "release") as tensors:
        from megappo.checkpoint.convert.disk_names import Piece

        key = "decoder.layers.self_attention.linear_qkv."
        q, k, v = (hf[f"model.layers.1.self_attn.{x}_proj.bias"].split(16) for x in "qkv")
        expected = torch.cat([q[0], q[1], k[0], v[0], q[2], q[3], k[1], v[1]])
        assert torch.equal(tensors.read(Piece(key + "bias", (1,)), 0, 128), expected)
        gate_up = tensors.read(Piece("decoder.layers.mlp.linear_fc1.weight", (0,)), 90, 100)
        gate, up = (hf[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up"))
        assert torch.equal(gate_up, torch.cat([gate[90:], up[:4]]))


def test_the_vocabulary_is_padded_with_zeros_and_cut_again(model, checkpoint):
    from megappo.checkpoint.convert.disk_names import Piece

    with TorchDistTensors(checkpoint / "release") as tensors:
        found = tensors.read(Piece("embedding.word_embeddings.weight"), 0, 256)
    assert found.shape == (256, 64)
    assert VOCAB == 131
    assert torch.equal(found[:VOCAB], stored(model)["model.embed_tokens.weight"])
    assert not found[VOCAB:].any()


def test_torch_itself_reads_the_checkpoint(model, checkpoint):
    """An independent reader: torch's distributed checkpoint, in one process."""
    import torch.distributed.checkpoint as dcp

    state = {
        "decoder.final_layernorm.weight": torch.zeros(64, dtype=torch.bfloat16),
        "decoder.layers.mlp.linear_fc2.weight": torch.zeros(2, 64, 96, dtype=torch.bfloat16),
    }
    dcp.load(state, checkpoint_id=str(checkpoint / "release"), no_dist=True)
    hf = stored(model)
    assert torch.equal(state["decoder.final_layernorm.weight"], hf["model.norm.weight"])
    downs = [hf[f"model.layers.{i}.mlp.down_proj.weight"] for i in range(2)]
    assert torch.equal(state["decoder.layers.mlp.linear_fc2.weight"], torch.stack(downs))


def test_megatron_finds_the_state_of_every_module_of_either_spec(checkpoint):
    """Transformer Engine's modules, norms and attention too, ask for it in a strict load."""
    with TorchDistTensors(checkpoint / "release") as tensors:
        objects = tensors.objects
    layer = "decoder.layers."
    for module in (
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "self_attention.core_attention",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
    ):
        assert {f"{layer}{module}._extra_state/shard_{i}_2" for i in range(2)} <= objects
    assert "decoder.final_layernorm._extra_state/shard_0_1" in objects


def test_mixed_dtypes_are_kept_and_one_can_be_asked_for(model, tmp_path):
    mixed = tmp_path / "mixed"
    shutil.copytree(model, mixed)
    tensors = stored(model)
    for name in ("model.norm.weight", "lm_head.weight"):
        tensors[name] = tensors[name].float() + 1e-6
    save_file(tensors, mixed / "model.safetensors", metadata={"format": "pt"})
    assert run("to-megatron", mixed, tmp_path / "m") == 0
    assert run("to-hf", tmp_path / "m", tmp_path / "hf", "--like", mixed) == 0
    assert_same_bits(mixed, tmp_path / "hf")
    assert run("to-hf", tmp_path / "m", tmp_path / "f", "--like", mixed, "--dtype", "float32") == 0
    found = stored(tmp_path / "f")
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in tensors.items())
    assert json.loads((tmp_path / "f" / "config.json").read_text())["dtype"] == "float32"


def test_a_head_that_is_the_embedding_is_left_out_and_any_other_is_refused(tmp_path, capsys):
    source = tmp_path / "tied"
    write_model(source, tie_word_embeddings=True)
    assert run("to-megatron", source, tmp_path / "m") == 2
    assert "lm_head.weight that is not the embedding" in capsys.readouterr().err
    tensors = stored(source)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert run("to-megatron", source, tmp_path / "m") == 0
    assert "dropped    lm_head.weight" in capsys.readouterr().out
    assert run("to-hf", tmp_path / "m", tmp_path / "hf", "--like", source) == 0
    assert stored(tmp_path / "hf").keys() == tensors.keys() - {"lm_head.weight"}
    assert run("verify", source, tmp_path / "hf") == 0


def test_parts_of_one_parameter_of_different_dtypes_are_refused(model, tmp_path, capsys):
    mixed = tmp_path / "mixed"
    shutil.copytree(model, mixed)
    tensors = stored(model)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].float()
    save_file(tensors, mixed / "model.safetensors", metadata={"format": "pt"})
    assert run("to-megatron", mixed, tmp_path / "m") == 2
    assert f"{name} torch.float32; choose one for all with --dtype" in capsys.readouterr().err


def test_files_of_a_chosen_size_have_a_right_index(model, checkpoint, tmp_path):
    out = tmp_path / "hf"
    command = ["to-hf", checkpoint, out, "--like", model, "--max-file-size", "40K"]
    assert run(*command, "--workers", 2) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert [f.name for f in files] == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    assert len(files) > 3
    lies_in, total = {}, 0
    for file in files:
        with safe_open(file, framework="pt") as f:
            assert f.metadata() == {"format": "pt"}
            sizes = [f.get_tensor(name).nbytes for name in f.keys()]  # noqa: SIM118
            lies_in |= dict.fromkeys(f.keys(), file.name)
        assert sum(sizes) <= 40_000 or len(sizes) == 1
        total += sum(sizes)
    assert index == {"metadata": {"total_size": total}, "weight_map": lies_in}
    assert_same_bits(model, out)


def test_verify_names_the_tensor_that_differs_and_its_hashes(model, checkpoint, tmp_path, capsys):
    assert run("verify", model, checkpoint) == 0
    told = capsys.readouterr().out
    assert "27 of 27 tensors are equal" in told
    assert told.count("sha256:") == 27
    other = tmp_path / "other"
    shutil.copytree(model, other)
    tensors = stored(model)
    tensors["model.norm.weight"][5] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert run("verify", checkpoint, other) == 1
    told = capsys.readouterr().out
    assert told.count("DIFFERENT") == 1
    assert "DIFFERENT  model.norm.weight bfloat16 [64] sha256:" in told
    assert "26 of 27 tensors are equal" in told


def test_inspect_says_what_it_is(model, checkpoint, capsys):
    assert run("inspect", checkpoint) == 0
    told = capsys.readouterr().out
    assert "format     torch_dist" in told
    assert (
        "arguments  tp 1, pp 1, ep 1, layers 2, hidden 64, heads 4, padded vocabulary 256" in told
    )
    assert "  decoder.layers.mlp.linear_fc1.weight [2, 192, 64] bfloat16" in told
    assert run("inspect", model) == 0
    assert "weights    27 tensors (27 bfloat16)" in capsys.readouterr().out


def test_a_dry_run_prints_the_plan_and_writes_nothing(model, tmp_path, capsys):
    before = sorted(tmp_path.iterdir())
    assert run("to-megatron", model, tmp_path / "m", "--dry-run") == 0
    told = capsys.readouterr().out
    assert "vocabulary 131 rows, padded to 256" in told
    assert "needed " in told
    assert "nothing was written" in told
    assert sorted(tmp_path.iterdir()) == before


def cut_off(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.truncate((folder / "model.safetensors").stat().st_size - 100)


def cut_header(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.truncate(60)


def lose_shard(folder: Path) -> None:
    _index(folder, {"lm_head.weight": "model-00002-of-00002.safetensors"})


def list_absent_tensor(folder: Path) -> None:
    _index(folder, {"model.layers.9.mlp.up_proj.weight": "model.safetensors"})


def _index(folder: Path, more: dict[str, str]) -> None:
    weight_map = dict.fromkeys(stored(folder), "model.safetensors") | more
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def other_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "qwen22"}))


def lose_tensor(folder: Path) -> None:
    tensors = stored(folder)
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    save_file(tensors, folder / "model.safetensors")


def strange_tensor(folder: Path) -> None:
    tensors = stored(folder)
    tensors["model.layers.1.self_attn.sinks"] = torch.zeros(4)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_off, "the file is cut off or damaged"),
        (cut_header, "is no safetensors file, or is cut off (60 bytes)"),
        (lose_shard, "lists files that are not there: model-00002-of-00002.safetensors"),
        (list_absent_tensor, "says that model.layers.9.mlp.up_proj.weight is in model.safetensors"),
        (other_architecture, "model_type 'qwen22' is not supported (did you mean 'qwen2'?)"),
        (lose_tensor, "missing model.layers.1.self_attn.k_proj.bias"),
        (strange_tensor, "unknown model.layers.1.self_attn.sinks"),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_a_damaged_folder_is_one_message_and_nothing_is_written(
    model, tmp_path, capsys, damage, message
):
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    damage(broken)
    assert run("to-megatron", broken, tmp_path / "m") == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["broken"]


def test_an_output_that_exists_is_kept_unless_overwrite_is_given(model, tmp_path, capsys):
    out = tmp_path / "m"
    out.mkdir()
    (out / "mine").write_text("precious")
    assert run("to-megatron", model, out) == 2
    assert f"{out} exists; give --overwrite" in capsys.readouterr().err
    assert (out / "mine").read_text() == "precious"
    assert run("to-megatron", model, out, "--overwrite") == 2
    assert "so it is not replaced" in capsys.readouterr().err
    assert (out / "mine").read_text() == "precious"
    (out / "mine").rename(out / "config.json")
    assert run("to-megatron", model, out, "--overwrite") == 2  # a program's, not a model's
    assert (out / "config.json").read_text() == "precious"
    (out / "model.safetensors").write_text("weights")
    assert run("to-megatron", model, out, "--overwrite") == 0
    assert sorted(p.name for p in out.iterdir()) == ["latest_checkpointed_iteration.txt", "release"]
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_what_is_read_is_never_replaced(model, tmp_path, capsys):
    source = tmp_path / "models" / "one"
    shutil.copytree(model, source)
    for out in (source, source.parent, tmp_path):
        assert run("to-megatron", source, out, "--overwrite") == 2
        assert f"{out} is, or holds, {source}, which is read" in capsys.readouterr().err
    assert_same_bits(model, source)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "for [2] layers or experts -> [3]"),
        ({"intermediate_size": 128}, "mlp.linear_fc1.weight [192, 64] -> [256, 64]"),
        ({"vocab_size": 300}, "embedding.word_embeddings.weight [256, 64] -> [300, 64]"),
        ({"tie_word_embeddings": True}, "left over output_layer.weight"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_checkpoint_of_another_model_is_refused(checkpoint, tmp_path, capsys, changes, message):
    write_model(tmp_path / "like", **changes)
    assert run("to-hf", checkpoint, tmp_path / "hf", "--like", tmp_path / "like") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tp", 3], "--tp 3 does not fit the model: 4 query heads do not divide by 3"),
        (["--pp", 3], "--pp 3 is more than the model's 2 layers"),
        (["--ep", 2], "this qwen2 model has no experts"),
    ],
    ids=str,
)
def test_a_layout_that_does_not_fit_is_refused(model, tmp_path, capsys, options, message):
    assert run("to-megatron", model, tmp_path / "m", *options) == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_that_is_cut_off_or_lacks_a_file_is_refused(
    model, checkpoint, tmp_path, capsys
):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    file = copy / "release" / "__0_0.distcp"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)
    assert run("to-hf", copy, tmp_path / "hf", "--like", model) == 2
    assert "the file is cut off" in capsys.readouterr().err
    file.unlink()
    assert run("to-hf", copy, tmp_path / "hf", "--like", model) == 2
    assert f"{file} is missing" in capsys.readouterr().err


class Danger:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_code_in_a_checkpoint_is_not_run(model, checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    (copy / "release" / ".metadata").write_bytes(pickle.dumps(Danger()))
    assert run("to-hf", copy, tmp_path / "hf", "--like", model) == 2
    assert ".metadata asks for posix.system" in capsys.readouterr().err
    rank = tmp_path / "legacy" / "mp_rank_00"
    rank.mkdir(parents=True)
    torch.save({"model": Danger()}, rank / "model_optim_rng.pt")
    assert run("to-hf", tmp_path / "legacy", tmp_path / "hf", "--like", model) == 2
    assert "cannot be loaded safely" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_other_formats_are_refused_by_name(model, tmp_path, capsys):
    old = tmp_path / "old"
    old.mkdir()
    (old / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    assert run("to-hf", old, tmp_path / "hf", "--like", model) == 2
    assert "of the old zarr format" in capsys.readouterr().err
    (old / ".metadata").write_bytes(b"")
    assert run("to-hf", old, tmp_path / "hf", "--like", model) == 2
    assert "has the format zarr version 1, which is not read" in capsys.readouterr().err
    assert run("to-hf", tmp_path / "nothing", tmp_path / "hf", "--like", model) == 2
    assert "does not exist" in capsys.readouterr().err


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_a_write_that_fails_leaves_nothing(model, tmp_path):
    """A limit on file sizes stands for a full disk, which needs a file system of its own."""
    command = [sys.executable, "-m", "megappo.cli", "convert", "to-megatron", model, "m"]
    done = subprocess.run(
        command, cwd=tmp_path, preexec_fn=limit_files, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert "writing m failed: File too large; nothing is left of it" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


UNFINISHED = """
import sys, time
from megappo.checkpoint.convert import output
from megappo.cli import main
output._take_place = lambda *paths: time.sleep(600)
main(sys.argv[1:])
"""


def test_a_killed_conversion_leaves_nothing_that_looks_finished(tmp_path):
    """It would not end by itself, so that the kill, while it writes, cannot come too late."""
    big = tmp_path / "big"
    write_model(big, vocab_size=200_000, hidden_size=256, intermediate_size=512)
    out, partial = tmp_path / "m", tmp_path / ".m.partial"
    arguments = ["convert", "to-megatron", str(big), str(out)]
    process = subprocess.Popen([sys.executable, "-c", UNFINISHED, *arguments])
    deadline = time.monotonic() + 300
    while not list(partial.glob("release/*.distcp")) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert partial.is_dir()
    assert not out.exists()
    assert main(arguments) == 0
    assert not partial.exists()
    assert main(["convert", "verify", str(big), str(out)]) == 0
