"""A run with every logger and traces of the profiler, resumed once; beside one with neither."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megappo.cli import main
from megappo.trainer.stopwatch import PHASES
from tests.tiny_run import make_run
from tests.unit.loggers.test_trackers import mlflow_runs, wandb_rows

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

OF_THE_CLOCK = ("timing_s/", "perf/", "rollout/sync_", "reward/overlap")

WATCHED = (
    "loggers=[console,jsonl,tensorboard,wandb,mlflow]", "tracking.wandb_mode=offline",
    "tracking.project_name=sums", "trainer.profile_steps=[2,3]",
)  # fmt: skip


def train(root: Path, name: str, steps: int, *overrides: str) -> Path:
    result = subprocess.run(
        [
            sys.executable, "-m", "megappo.launch", "--nproc-per-node", "2", str(root / "run.yaml"),
            f"trainer.run_dir={root / name}", "rollout.engine=megatron", "trainer.test_freq=0",
            "trainer.val_before_train=false", "checkpoint.export_hf=false",
            "actor.optim.lr_decay_style=constant", f"trainer.total_steps={steps}", *overrides,
        ],
        capture_output=True, text=True, timeout=900, check=False,
        # wandb gives its own process 30 s to start.
        env=os.environ | {"OMP_NUM_THREADS": "1", "WANDB__SERVICE_WAIT": "300"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return root / name


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The watched run was killed, as it were, after it had logged step 3 and saved step 2."""
    root = tmp_path_factory.mktemp("watched")
    make_run(root, tie_word_embeddings=False)
    plain = train(root, "plain", 3, "loggers=[jsonl]")
    watched = train(root, "watched", 3, *WATCHED)
    (watched / "checkpoints" / "latest").write_text("step_000002\n")
    train(root, "watched", 4, *WATCHED)
    return plain, watched


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(OF_THE_CLOCK)} for row in rows]


def test_numbers_are_bit_equal_with_and_without_traces_and_loggers(runs):
    plain, watched = map(numbers, runs)
    assert [row["step"] for row in plain] == [1, 2, 3]
    assert watched[:3] == plain
    assert all("actor/grad_norm" in row for row in plain)  # what the update before has led to


def test_each_rank_has_a_trace_of_each_listed_step_with_its_phases(runs):
    folder = runs[1] / "profile"
    names = [f"step_{step}_rank_{rank}.json.gz" for step in (2, 3) for rank in (0, 1)]
    assert sorted(path.name for path in folder.iterdir()) == names
    with gzip.open(folder / names[1], "rt") as file:
        events = json.load(file)["traceEvents"]
    found = {event["name"] for event in events}
    assert {f"phase/{phase}" for phase in PHASES} <= found
    assert any(name.startswith("aten::") for name in found)


def test_no_step_stands_twice_in_any_logger_after_a_resume(runs):
    watched = runs[1]
    assert [row["step"] for row in numbers(watched)] == [1, 2, 3, 4]
    name = "critic/score/mean"
    board = EventAccumulator(str(watched / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars(name)] == [1, 2, 3, 4]
    assert [step for _, step, _ in wandb_rows(watched)] == [1, 2, 3, 4]
    assert len({run_id for run_id, _, _ in wandb_rows(watched)}) == 1
    client, (run,) = mlflow_runs(watched)
    history = client.get_metric_history(run.info.run_id, name)
    assert [metric.step for metric in history] == [1, 2, 3, 4]
    assert run.data.params["trainer.seed"] == "1"
    assert "logger_failed" not in (watched / "events.jsonl").read_text()


def test_the_report_of_both_is_written(runs, capsys):
    assert main(["report", *map(str, runs)]) == 0
    page = (runs[0] / "report.html").read_text()
    assert '"tokens":["' in page
    assert "warning" not in capsys.readouterr().err
