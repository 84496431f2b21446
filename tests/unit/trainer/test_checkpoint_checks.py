"""A checkpoint that does not fit is told of in the same call as every other mistake."""

from __future__ import annotations

import json
import shutil

import pytest

from megappo.checkpoint.compare import LAYOUT_FIELDS, flatten, model_identity
from megappo.checkpoint.layout import write_state
from megappo.cli import main
from megappo.config import load
from megappo.trainer.preflight import preflight
from tests.tiny_run import make_run


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A run, and the small states of two of its checkpoints: `run`, and `lora` with adapters."""
    folder = tmp_path_factory.mktemp("resume")
    make_run(folder)
    for name, overrides in (("run", []), ("lora", ["actor.lora.rank=2"])):
        config = load(folder / "run.yaml", [f"trainer.run_dir={folder / name}", *overrides])
        found = preflight(config, 1)
        state = {
            "step": 2,
            "layout": {field: getattr(found.plan, field) for field in LAYOUT_FIELDS},
            "models": {role: model_identity(found.actor_spec) for role in ("actor", "critic")},
            "config": flatten(config),
            "sampler": found.sampler.state_dict(),
            "train_files": list(found.train_files),
            "base_weights": found.base_weights,
        }
        checkpoint = folder / name / "checkpoints" / "step_000002"
        checkpoint.mkdir(parents=True)
        write_state(checkpoint, state)
    shutil.copytree(folder / "model", folder / "other")
    settings = json.loads((folder / "model" / "config.json").read_text())
    (folder / "other" / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 0.5}))
    return folder


@pytest.fixture
def check(root, capsys):
    """Exit code, and what is right or the list of what is wrong."""

    def run(*arguments: str) -> tuple[int, str, list[str]]:
        code = main(["check", str(root / "run.yaml"), *arguments])
        shown = capsys.readouterr()
        lines = shown.err.splitlines()
        found = [line.removeprefix("  - ") for line in lines if line.startswith("  - ")]
        return code, shown.out, found or [line.removeprefix("error: ") for line in lines]

    return run


def assert_each_is_said_once(found: list[str], expected: list[str]) -> None:
    assert [sum(part in line for line in found) for part in expected] == [1] * len(expected), found
    assert len(found) == len(expected)


def test_a_checkpoint_that_fits_is_no_mistake_and_changes_are_shown(check):
    code, shown, _ = check("actor.optim.lr=2e-3", "--world-size=2")
    assert code == 0
    assert "changed    actor.optim.lr 0.001 -> 0.002 (since " in shown
    assert "changed    world_size 1 -> 2, dp 1 -> 2; random streams start anew" in shown


def test_all_in_which_a_run_does_not_fit_its_checkpoint_is_told_with_its_other_mistakes(
    root, check
):
    code, _, found = check(
        "actor.optim.beta1=2", "trainer.seed=5", "model.dtype=bfloat16",
        f"data.train_files=[{root}/data/val.parquet]", f"critic.path={root}/other",
        "parallel.tp=2", "--world-size=3",
    )  # fmt: skip
    assert code == 2
    expected = [
        "actor.optim.beta1 is 2.0",
        "3 ranks cannot be split by TP 2",
        "was saved with other settings (checkpoint -> now): model.dtype float32 -> bfloat16",
        "was trained on other data: data.train_files[0] was train.parquet",
        "holds another critic (checkpoint -> now): norm_eps",
        "seed",
    ]
    assert_each_is_said_once(found, expected)


def test_what_stands_in_for_a_mistake_is_not_compared_with_a_checkpoint(check):
    code, _, found = check(
        "model.dtype=float99", "data.shuffle=maybe", "trainer.seed=-1", "parallel.tp=some",
        "actor.lora.rank=-1", "algorithm.kl_ctrl=none",
    )  # fmt: skip
    assert code == 2
    expected = [
        "model.dtype", "data.shuffle", "trainer.seed", "parallel.tp", "actor.lora.rank",
        "algorithm.kl_ctrl",
    ]  # fmt: skip
    assert_each_is_said_once(found, expected)


def test_what_cannot_be_read_is_told_once_and_hides_nothing_of_the_checkpoint(root, check):
    code, _, found = check(
        f"trainer.run_dir={root}/lora", "model.path=nowhere", "data.train_files=[none.parquet]",
        "actor.lora.rank=4",
    )  # fmt: skip
    assert code == 2
    expected = [
        "model folder nowhere does not exist",
        "train file none.parquet does not exist",
        "actor.lora.rank 2 -> 4 (the adapters are made for it)",
    ]
    assert_each_is_said_once(found, expected)


def test_weights_below_adapters_are_compared_where_there_are_weights(root, check, tmp_path):
    lora = (f"trainer.run_dir={root}/lora", "actor.lora.rank=2")
    assert check(*lora)[0] == 0
    for file in (root / "model").iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path / file.name)
    assert check(*lora, f"model.path={tmp_path}", "--no-weights")[0] == 0
    (tmp_path / "model.safetensors").write_bytes(b"other")
    code, _, (problem,) = check(*lora, f"model.path={tmp_path}", "--no-weights")
    assert code == 2
    assert "has the actor's adapters alone, and the weights in its folder are not those" in problem


def test_a_checkpoint_of_another_task_is_compared_no_further(root, check):
    path = root / "run" / "checkpoints" / "step_000002" / "state.json"
    before = path.read_text()
    state = json.loads(before)
    state["config"]["task"] = "rm"
    path.write_text(json.dumps(state))
    try:
        code, _, (problem,) = check("trainer.seed=5")
    finally:
        path.write_text(before)
    assert code == 2
    assert "is of a run with task rm, and task is ppo now" in problem
