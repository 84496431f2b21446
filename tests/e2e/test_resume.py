"""A run that is resumed by another command than it was started with: layout, settings, data.

With the in-process engine, which needs no start of SGLang.
"""

import json
import shutil
import subprocess

import pytest

from tests.e2e.test_run import TIME_LIMIT_S, command, metrics, train
from tests.tiny_run import make_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

SHORT = [
    "rollout.engine=megatron", "rollout.max_running_requests=12", "trainer.total_steps=3",
    "trainer.test_freq=0", "trainer.val_before_train=false", "checkpoint.export_hf=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resumed")
    make_run(folder, tie_word_embeddings=False)
    train(
        folder, "whole", *SHORT, "parallel.tp=2", "trainer.save_freq=1", "checkpoint.keep=3",
    )  # fmt: skip
    return folder


def copied(root, name):
    """The run as it was after its second step."""
    shutil.copytree(root / "whole", root / name)
    (root / name / "checkpoints" / "latest").write_text("step_000002\n")
    shutil.rmtree(root / name / "checkpoints" / "step_000003")
    return root / name


def rows_of(run_dir, step):
    lines = (run_dir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line)["row"] for line in lines]


def test_a_run_of_tp_2_goes_on_at_dp_2_with_the_same_prompts_and_numbers(root):
    run_dir = copied(root, "other_layout")
    result = train(root, "other_layout", *SHORT, "guard.warn_log_prob_diff=0.2")
    assert "resuming   from" in result.stdout
    assert (
        "changed    tp 2 -> 1, etp 2 -> 1, dp 1 -> 2; random streams start anew from trainer.seed"
    ) in result.stdout
    assert "changed    guard.warn_log_prob_diff 0.1 -> 0.2" in result.stdout
    resumed = next(
        json.loads(line)
        for line in (run_dir / "events.jsonl").read_text().splitlines()
        if json.loads(line)["kind"] == "resumed"
    )
    assert "guard.warn_log_prob_diff 0.1 -> 0.2" in resumed["changes"]
    whole, half = (set(rows_of(folder, 3)) for folder in (root / "whole", run_dir))
    assert len(whole) == 8
    assert len(half) == 4  # rank 0's
    assert half < whole
    expected, found = metrics(root / "whole")[-1], metrics(run_dir)[-1]
    assert found["step"] == expected["step"] == 3
    for key in ("critic/score/mean", "response_length/mean", "actor/lr", "actor/kl_coef"):
        assert found[key] == pytest.approx(expected[key], rel=1e-5), key
    for key in ("critic/vf_loss", "actor/pg_loss", "actor/entropy"):
        assert found[key] == pytest.approx(expected[key], abs=1e-5), key
    for key in ("critic/grad_norm", "actor/grad_norm"):
        assert found[key] == pytest.approx(expected[key], rel=1e-4), key


def test_other_data_is_refused_before_anything_is_written(root):
    run_dir = copied(root, "other_data")
    before = sorted(p.name for p in run_dir.rglob("*"))
    other = root / "data" / "val.parquet"
    result = subprocess.run(
        command(root, "other_data", *SHORT, "parallel.tp=2", f'data.train_files=["{other}"]'),
        capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False,
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("error: ") == 1
    assert "was trained on other data: data.train_files[0] was train.parquet of" in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(p.name for p in run_dir.rglob("*")) == before
