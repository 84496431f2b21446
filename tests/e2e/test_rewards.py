"""Whole runs with sums of rewards and a user's own function: with and without overlap, and refused.

The in-process engine generates on two ranks that share a model, so each scores what others asked.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.tiny_run import make_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

TIME_LIMIT_S = 900
REWARDS = """
import time

def near(responses, ground_truths, extra_infos):
    print("near is at work")
    return [-abs(len(r) - len(t)) - info["response_tokens"] / 8
            for r, t, info in zip(responses, ground_truths, extra_infos)]

def fails(response):
    raise RuntimeError("of no use")

def picky(response, ground_truth):
    if (len(response) + int(ground_truth)) % 2:
        raise RuntimeError("odd")
    return -1.0 - len(ground_truth)

def typo(respnse):
    return 1.0
"""
SOURCES = {
    "arithmetic": [
        "arithmetic",
        {"name": "custom", "label": "near", "weight": 0.25},
        {"name": "length", "weight": -0.5, "free_tokens": 1, "max_tokens": 5},
    ]
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewarded")
    make_run(folder, tie_word_embeddings=False)
    (folder / "mine.py").write_text(REWARDS)
    return folder


def run(root: Path, name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megappo.launch", "--nproc-per-node", "2", str(root / "run.yaml"),
         f"trainer.run_dir={root / name}", "rollout.engine=megatron", "parallel.tp=2",
         "trainer.total_steps=2", "trainer.test_freq=1", "trainer.save_freq=0",
         "checkpoint.export_hf=false", f"reward.custom.path={root / 'mine.py'}",
         "reward.custom.name=near", f"reward.sources={json.dumps(SOURCES)}", *overrides],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIME_LIMIT_S,
        check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """Without what depends on time, and `reward/overlap`."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    times = ("timing_s/", "perf/", "rollout/sync_", "reward/overlap", "checkpoint/")
    return [{k: v for k, v in row.items() if not k.startswith(times)} for row in rows]


def test_scores_are_bit_equal_with_and_without_overlap(root):
    rloo = ("algorithm.adv_estimator=rloo", "actor.policy_loss=cispo")
    with_it = run(root, "with", "reward.num_examine=1", *rloo)
    assert with_it.returncode == 0, with_it.stdout
    without = run(root, "without", "reward.overlap=false", *rloo)
    assert without.returncode == 0, without.stdout
    assert metrics(root / "with") == metrics(root / "without")
    samples = [
        (root / name / "rollouts/step_000002.jsonl").read_text() for name in ("with", "without")
    ]
    assert samples[0] == samples[1]

    rows = [json.loads(line) for line in (root / "with/metrics.jsonl").read_text().splitlines()]
    assert all(0 <= row["reward/overlap"] <= 1 for row in rows[1:])
    assert "reward/overlap" not in (root / "without/metrics.jsonl").read_text()
    for row, prefix in [(row, p) for row in rows[1:] for p in ("reward/", "val/reward/")]:
        part = {
            label: row[f"{prefix}arithmetic/{label}"] for label in ("arithmetic", "near", "length")
        }
        total = part["arithmetic"] + 0.25 * part["near"] - 0.5 * part["length"]
        assert row[f"{prefix}arithmetic/score"] == pytest.approx(total, rel=1e-9)
        assert part["near"] < 0 < part["length"]
    assert rows[1]["critic/score/mean"] == pytest.approx(
        rows[1]["reward/arithmetic/score"], rel=1e-6
    )
    assert rows[1]["reward/error_rate"] == rows[1]["reward/timeouts"] == 0
    assert all(row["actor/grad_norm"] > 0 for row in rows[1:])

    assert with_it.stdout.count("data_source arithmetic, score ") == 2  # one a step
    assert "near is at work" in (root / "with/logs/rank_00001.log").read_text()
    assert "near is at work" not in (root / "with/metrics.jsonl").read_text()
    left = [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(root) in " ".join(p.info["cmdline"] or [])
    ]
    assert psutil.wait_procs(left, timeout=30)[1] == []


def test_a_reward_that_fails_ends_the_run_on_every_rank_with_its_cause(root):
    ended = run(root, "fails", "reward.custom.name=fails", "trainer.val_before_train=false")
    assert ended.returncode == 1, ended.stdout
    assert "100.0% of the rewards failed, over reward.max_error_rate (5.0%)" in ended.stdout
    logs = [(root / f"fails/logs/rank_0000{rank}.log").read_text() for rank in (0, 1)]
    assert any("RuntimeError: of no use (mine.py:10 in fails)" in log for log in logs)


def test_a_sample_whose_reward_failed_is_not_the_best_of_a_reward_below_zero(root):
    ended = run(
        root, "picky", "reward.custom.name=picky", "reward.sources.arithmetic=custom",
        "reward.max_error_rate=1", "trainer.rollouts_per_step=-1",
        "algorithm.adv_estimator=reinforce_pp", "actor.policy_loss=sapo",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    first, *steps = metrics(root / "picky")
    assert [step["step"] for step in steps] == [1, 2], "the run goes on"
    for step in steps:
        samples = [
            json.loads(line)
            for line in (root / f"picky/rollouts/step_{step['step']:06}.jsonl")
            .read_text()
            .splitlines()
        ]
        failed = [s for s in samples if is_refused(s["response"], s["ground_truth"])]
        assert 0 < len(failed) < len(samples)
        assert [s for s in samples if s["score"] is None] == failed
        assert step["reward/error_rate"] == pytest.approx(len(failed) / len(samples))
        scores = [-1.0 - len(s["ground_truth"]) for s in samples if s not in failed]
        assert step["critic/score/max"] == max(scores) < 0
        assert step["critic/score/mean"] == pytest.approx(sum(scores) / len(scores))
        assert step["reward/arithmetic/score"] == step["train/arithmetic/score/mean"]
        assert step["actor/grad_norm"] > 0
    assert 0 < first["val/reward_error"] < 1
    assert first["val/score/mean"] <= -2.0  # at least one character of ground truth


def is_refused(response, ground_truth):
    """What `picky` raises at: in both splits for some prompts, however a greedy answer looks."""
    return (len(response) + int(ground_truth)) % 2 == 1


def test_check_refuses_rewards_that_cannot_work(root):
    wrong = {
        "reward.custom.name=typo": "has the parameter 'respnse': its parameters are named",
        'reward.sources={"arithmetic": ["aritmetic"]}': "did you mean 'arithmetic'?",
    }
    started = {
        override: subprocess.Popen(
            [sys.executable, "-m", "megappo.cli", "check", str(root / "run.yaml"),
             f"reward.custom.path={root / 'mine.py'}", "reward.sources.arithmetic=custom",
             override],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for override in wrong
    }  # fmt: skip
    for override, process in started.items():
        said, _ = process.communicate(timeout=TIME_LIMIT_S)
        assert process.returncode == 2, said
        assert wrong[override] in said, said
        assert "Traceback" not in said
