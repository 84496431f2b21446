"""Runs without a critic by the command line: dynamic sampling, exact resume, and learning."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_run import make_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

OVERRIDES = [
    "algorithm.adv_estimator=grpo", "algorithm.filter_groups=true",
    "algorithm.max_sampling_rounds=2", "algorithm.mask_truncated=true", "reward.overlong_buffer=2",
    "actor.policy_loss=gspo", "rollout.engine=megatron", "data.curriculum=score",
    "loggers=[console,jsonl]", "checkpoint.export_hf=false", "trainer.val_before_train=false",
]  # fmt: skip


def train(root: Path, name: str, *overrides: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "megappo.launch", "--nproc-per-node", "2", str(root / "run.yaml"),
         f"trainer.run_dir={root / name}", *OVERRIDES, *overrides],
        capture_output=True, text=True, timeout=900, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    clocks = ("timing_s/", "perf/", "rollout/sync_", "reward/overlap")
    return {row["step"]: {k: v for k, v in row.items() if not k.startswith(clocks)} for row in rows}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("algorithms")
    make_run(root, tie_word_embeddings=False)
    screen = train(root, "straight")
    shutil.copytree(root / "straight", root / "resumed")
    checkpoints = root / "resumed" / "checkpoints"
    shutil.rmtree(checkpoints / "step_000004")
    (checkpoints / "latest").write_text("step_000002\n")
    train(root, "resumed")
    return root, screen


def test_no_critic_is_planned_measured_or_saved(runs):
    root, screen = runs
    assert "actor 2 of 4 samples, no critic" in screen
    saved = {p.name for p in (root / "straight" / "checkpoints" / "step_000004").iterdir()}
    assert "actor" in saved
    assert "critic" not in saved
    of_a_model = ("critic/vf", "critic/values", "critic/returns", "critic/lr", "critic/grad_norm")
    of_samples = {"critic/score/mean", "critic/rewards/mean", "critic/advantages/mean"}
    for row in metrics(root / "straight").values():
        assert of_samples <= row.keys()
        assert not [name for name in row if name.startswith(of_a_model)]


def test_groups_that_teach_nothing_are_replaced_up_to_the_bound(runs):
    rows = metrics(runs[0] / "straight").values()
    assert {row["sampling/rounds"] for row in rows} <= {1.0, 2.0}
    assert max(row["sampling/rounds"] for row in rows) == 2
    for row in rows:
        assert row["rollout/group_diversity"] > 0.25
        assert row["train/arithmetic/score/mean"] == pytest.approx(row["critic/score/mean"])
        assert row["reward/overlong_penalty"] <= 0
        kept = row["sampling/kept_share"] * row["sampling/rounds"]  # in batches
        assert row["sampling/filled_share"] == pytest.approx(max(0.0, 1.0 - kept))
    assert any(row["sampling/filled_share"] > 0 for row in rows)
    assert any(row["actor/grad_norm"] > 0 for row in rows)


def test_a_curriculum_knows_the_scores_of_all_batches_drawn(runs):
    """8 of 64 rows a round, of which none comes again before all were drawn."""
    rounds = 0.0
    for row in metrics(runs[0] / "straight").values():
        rounds += row["sampling/rounds"]
        assert row["sampling/unseen_rows"] == 64 - 8 * rounds
        assert 0 <= row["sampling/curriculum_mean_score"] <= 1
    last = json.loads(
        (runs[0] / "straight" / "checkpoints" / "step_000004" / "state.json").read_text()
    )
    assert last["sampler"]["kind"] == "curriculum"
    assert last["sampler"]["num_batches"] == rounds


def test_a_resumed_run_draws_the_prompts_and_has_the_numbers_of_an_undisturbed_one(runs):
    straight, resumed = (metrics(runs[0] / name) for name in ("straight", "resumed"))
    assert set(resumed) == set(straight) == {1, 2, 3, 4}
    assert resumed[4] == straight[4]
    assert resumed[3] == straight[3]


SHORT_ANSWERS = {"arithmetic": [{"name": "length", "free_tokens": 1, "max_tokens": 3}]}
"""1 for a response of one token, 0.5 for two and 0 for three."""


@pytest.mark.parametrize("name", ["dr_grpo", "reinforce_pp_baseline"])
def test_a_policy_learns_without_a_critic(tmp_path, name):
    """Others by name: rloo and reinforce_pp in test_rewards.py, remax in test_run.py."""
    make_run(tmp_path, tie_word_embeddings=False)
    result = subprocess.run(
        [sys.executable, "-m", "megappo.launch", "--nproc-per-node", "1",
         str(tmp_path / "run.yaml"), f"algorithm.adv_estimator={name}",
         f"reward.sources={json.dumps(SHORT_ANSWERS)}",
         "rollout.engine=megatron", "actor.optim.lr=1e-2", "actor.optim.lr_warmup_steps=0",
         "actor.optim.lr_decay_style=constant", "trainer.total_steps=5", "trainer.test_freq=0",
         "trainer.val_before_train=false", "trainer.save_freq=0", "checkpoint.export_hf=false"],
        capture_output=True, text=True, timeout=400, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = metrics(tmp_path / "run")
    assert rows[1]["critic/score/mean"] < 0.6
    assert rows[5]["critic/score/mean"] > 0.8
    assert not [metric for metric in rows[5] if metric.startswith("critic/vf")]
