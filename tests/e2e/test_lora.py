"""A run that trains adapters: engine against trainer, checkpoint, resume, and what it leaves."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open

from megappo.cli import main
from tests.e2e.test_run import metrics, train, weights_hash
from tests.tiny_run import make_model, make_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

LORA = [
    "actor.lora.rank=8",
    "critic.lora.rank=4",
    "actor.lora.target_modules=[linear_qkv,linear_fc1,linear_fc2]",
    "actor.optim.lr=5e-3",
    "parallel.tp=2",
    "trainer.total_steps=3",
    "trainer.save_freq=1",
    "trainer.test_freq=0",
    "checkpoint.keep=4",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    make_run(root, tie_word_embeddings=False)
    train(root, "whole", *LORA)
    shutil.copytree(root / "whole", root / "parts")  # as it was after the second step
    checkpoints = root / "parts" / "checkpoints"
    shutil.rmtree(checkpoints / "step_000003")
    (checkpoints / "latest").write_text("step_000002\n")
    for name in ("actor_hf", "actor_peft"):
        shutil.rmtree(root / "parts" / name)
    train(root, "parts", *LORA)
    assert (checkpoints / "latest").read_text() == "step_000003\n"
    return root


def test_the_engine_gets_the_merged_weights(runs):
    rows = metrics(runs / "whole")[1:]
    assert len(rows) == 3
    # float32 on both sides; the adapters of step 1 and 2 alone move log-probs by more than 1e-2.
    assert all(row["rollout/log_prob_diff_max"] < 1e-4 for row in rows)
    assert rows[-1]["actor/kl_loss"] > 1e-4, "the adapters changed nothing"


def test_a_run_in_two_parts_is_the_run_in_one(runs):
    assert metrics(runs / "parts") == metrics(runs / "whole")
    assert weights_hash(runs / "parts") == weights_hash(runs / "whole")


def test_a_checkpoint_has_the_adapters_alone(runs):
    from torch.distributed.checkpoint import FileSystemReader

    folder = runs / "whole" / "checkpoints" / "step_000003" / "actor"
    names = FileSystemReader(folder).read_metadata().state_dict_metadata
    assert any(".lora." in name for name in names)
    assert all(".lora." in name or "scheduler" in name for name in names), sorted(names)


def test_the_end_leaves_merged_weights_and_a_peft_folder(runs):
    peft = runs / "whole" / "actor_peft"
    settings = json.loads((peft / "adapter_config.json").read_text())
    assert settings["r"] == 8
    assert sorted(settings["target_modules"]) == [
        "down_proj", "gate_proj", "k_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip
    name = "model.layers.2.mlp.down_proj"
    with (
        safe_open(peft / "adapter_model.safetensors", "pt") as adapters,
        safe_open(runs / "model" / "model.safetensors", "pt") as base,
        safe_open(runs / "whole" / "actor_hf" / "model.safetensors", "pt") as merged,
    ):
        a = adapters.get_tensor(f"base_model.model.{name}.lora_A.weight")
        b = adapters.get_tensor(f"base_model.model.{name}.lora_B.weight")
        expected = base.get_tensor(f"{name}.weight") + 16 / 8 * (b @ a)
        assert (merged.get_tensor(f"{name}.weight") - expected).abs().max() < 1e-6
        assert b.abs().max() > 1e-3
        untouched = "model.layers.2.self_attn.o_proj.weight"
        assert torch.equal(merged.get_tensor(untouched), base.get_tensor(untouched))


def test_what_does_not_fit_the_adapters_is_refused(runs, capsys):
    def refused(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        return capsys.readouterr().err

    check = ["check", str(runs / "run.yaml"), f"trainer.run_dir={runs / 'whole'}", *LORA]
    assert "actor.lora.rank 8 -> 4" in refused(*check, "actor.lora.rank=4")
    assert "actor.lora.alpha 16.0 -> 32.0" in refused(*check, "actor.lora.alpha=32")
    make_model(runs / "other", seed=1, tie_word_embeddings=False)
    assert "not those that they were trained on" in refused(*check, f"model.path={runs / 'other'}")
    new = ["check", str(runs / "run.yaml"), f"trainer.run_dir={runs / 'new'}", "actor.lora.rank=8"]
    assert "known: linear_qkv" in refused(*new, "actor.lora.target_modules=[q_proj]")
    assert "parallel.fsdp" in refused(*new, "parallel.fsdp=true")
    make_model(runs / "experts", family="qwen3_moe")
    assert "experts (qwen3_moe) get no adapters" in refused(*new, f"model.path={runs / 'experts'}")
    step = runs / "whole" / "checkpoints" / "step_000003"
    assert "adapters alone" in refused(
        "convert", "to-hf", str(step), str(runs / "hf"), "--like", str(runs / "model")
    )
