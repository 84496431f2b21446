"""`megappo train-rm` and `train-sft` as a user runs them: stop, resume, export, mistakes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megappo.data.preferences import write_preferences
from tests.distributed.test_learning import CONFIG
from tests.tiny_run import make_model, make_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rm runs")
    make_model(folder / "model")
    write_preferences(folder / "data", seed=0, num_train=64, num_val=6)
    (folder / "rm.yaml").write_text(CONFIG.format(root=folder))
    return folder


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command, *rest = arguments
    ranks = ["--nproc-per-node", "2"] if command.startswith("train") else []
    return subprocess.run(
        [sys.executable, "-m", "megappo.cli", command, *ranks, str(root / "rm.yaml"), *rest],
        capture_output=True, text=True, timeout=600, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


def rows(run_dir: Path) -> list[dict[str, float]]:
    read = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k.startswith(("rm/", "sft/", "val/", "step"))}
        for row in read
    ]


SHORT = ("trainer.total_steps=4", "trainer.test_freq=2", "trainer.save_freq=2")


def test_a_reward_model_run_goes_on_from_a_checkpoint_with_the_same_numbers(root):
    whole = run(root, "train-rm", f"trainer.run_dir={root / 'whole'}", *SHORT)
    assert whole.returncode == 0, whole.stderr
    assert "64 of 64 train rows (0 over data.max_length, 0 with equal answers" in whole.stdout
    parts = root / "parts"
    shutil.copytree(root / "whole", parts)
    shutil.rmtree(parts / "rm_hf")
    shutil.rmtree(parts / "checkpoints" / "step_000004")
    (parts / "checkpoints" / "latest").write_text("step_000002\n")
    watched = ("trainer.profile_steps=[4]", "trainer.device_peak_tflops=0.5")
    resumed = run(root, "train-rm", f"trainer.run_dir={parts}", *watched, *SHORT)
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming   from {parts / 'checkpoints' / 'step_000002'}" in resumed.stdout
    assert rows(parts) == rows(root / "whole")
    assert len(rows(parts)) == 5
    check_watched(parts)
    for folder in (root / "whole", parts):
        settings = json.loads((folder / "rm_hf" / "config.json").read_text())
        assert settings["architectures"] == ["Qwen2ForSequenceClassification"]
        assert json.loads((folder / "rm_hf" / "megappo_step.json").read_text()) == {"step": 4}
    weights = [(f / "rm_hf" / "model.safetensors").read_bytes() for f in (root / "whole", parts)]
    assert weights[0] == weights[1]
    again = run(root, "train-sft", f"trainer.run_dir={parts}", *SHORT)
    assert again.returncode == 2
    assert "is of a run with task rm, and task is sft now" in again.stderr


def check_watched(run_dir):
    """The resumed run's second step alone has a trace on each rank; both steps have an MFU."""
    traces = sorted(path.name for path in (run_dir / "profile").iterdir())
    assert traces == ["step_4_rank_0.json.gz", "step_4_rank_1.json.gz"]
    kinds = [json.loads(line)["kind"] for line in (run_dir / "events.jsonl").open()]
    assert kinds.count("profiled") == 1
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    for line in lines[3:]:
        tokens_per_s, mfu = line["perf/tokens_per_s"], line["perf/mfu/rm"]
        assert mfu == pytest.approx(line["perf/tflops/rm"] / 0.5)
        # A pass costs two operations a weight and token at least, and a step is three passes.
        weights = 4 * (32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 64)
        assert mfu * 0.5e12 > 6 * weights * tokens_per_s / 2
    assert not [name for line in lines[:3] for name in line if name.startswith("perf/mfu")]


def test_a_row_that_cannot_be_used_ends_the_run_with_2_and_is_named_once(root):
    table = pq.read_table(root / "data" / "train.parquet")
    broken = table.set_column(1, "chosen", pa.array([*table["chosen"].to_pylist()[:-1], None]))
    pq.write_table(broken, root / "broken.parquet", row_group_size=8)
    change = f"data.train_files=['{root / 'broken.parquet'}']"
    result = run(root, "train-rm", change, f"trainer.run_dir={root / 'broken'}", *SHORT)
    assert result.returncode == 2
    assert result.stderr.count("its row 63), column chosen: an answer must be text") == 1
    assert "Traceback" not in result.stderr
    checked = run(root, "check", change)
    assert checked.returncode == 2
    assert "its row 63), column chosen" in checked.stderr


def test_ppo_takes_its_reward_from_a_reward_model_beside_the_rule(root):
    trained = root / "whole" / "rm_hf"
    if not trained.is_dir():
        short = ("trainer.total_steps=1", "trainer.val_before_train=false", "trainer.test_freq=0")
        assert run(root, "train-rm", f"trainer.run_dir={root / 'whole'}", *short).returncode == 0
    folder = root / "ppo"
    folder.mkdir()
    make_run(folder)
    result = subprocess.run(
        [
            sys.executable, "-m", "megappo.launch", "--nproc-per-node", "2",
            str(folder / "run.yaml"), f"reward_model.path={trained}", "reward_model.weight=3",
            "reward_model.rule_weight=0.5", "reward_model.param_offload=true",
            "rollout.engine=megatron", "trainer.total_steps=1", "trainer.test_freq=1",
        ],
        capture_output=True, text=True, timeout=600, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    before, step = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    model, rules = step["reward/model/mean"], step["reward/rules/mean"]
    assert abs(model) > 1e-6
    assert step["critic/score/mean"] == pytest.approx(3 * model + 0.5 * rules, abs=1e-6, rel=1e-6)
    assert abs(before["val/reward_model/mean"]) > 1e-6
    samples = (folder / "run" / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    scores = {json.loads(line)["score"] for line in samples}
    assert len(scores) > 2  # not a rule's 0 and 1
