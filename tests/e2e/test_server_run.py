"""A whole run over an SGLang server that somebody else runs, kills and starts again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megappo.rollout.sglang_settings import CONTEXT_RESERVE
from tests.sglang_server import KEY, LaunchedServer
from tests.tiny_run import make_run

# A server starts twice; on a loaded machine each start takes minutes.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

TIME_LIMIT_S = 900
SHORT = [
    "trainer.total_steps=3", "trainer.test_freq=0", "trainer.val_before_train=false",
    "trainer.save_freq=0", "checkpoint.export_hf=false", "rollout.verify_sync=always",
]  # fmt: skip
CLOCK = (
    "timing_s/", "perf/", "reward/overlap", "rollout/sync_", "rollout/engine_restarts",
    "rollout/aborted",
)  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder, tie_word_embeddings=False)
    return folder


@pytest.fixture(scope="module")
def server(root):
    """One that is still starting when the first run asks for it."""
    context = 128 + 3 + CONTEXT_RESERVE
    server = LaunchedServer(root / "model", root / "server.log", context_length=context)
    server.start()
    yield server
    server.kill()


def start(root: Path, name: str, *overrides: str) -> subprocess.Popen[str]:
    """One rank: with one engine or one server, both form the same batches."""
    return subprocess.Popen(
        [
            sys.executable, "-m", "megappo.launch", "--nproc-per-node", "1",
            str(root / "run.yaml"), f"trainer.run_dir={root / name}", *SHORT, *overrides,
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "SERVER_KEY": KEY},
    )  # fmt: skip


def finish(root: Path, name: str, process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=TIME_LIMIT_S)
    logs = "\n".join(p.read_text()[-3000:] for p in (root / name / "logs").glob("*.log"))
    assert process.returncode == 0, f"{out}\n{err}\n{logs}"
    return out


def rows(run_dir: Path) -> list[dict[str, float]]:
    """Every step's metrics without those of clock, machine and restarts."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(CLOCK)} for line in lines
    ]


def start_over(root: Path, name: str, server: LaunchedServer, *, wait_s: int):
    return start(
        root, name, f"rollout.url={server.url}", "rollout.api_key_env=SERVER_KEY",
        f"rollout.server_wait_s={wait_s}", "rollout.timeout_s=300",
    )  # fmt: skip


def wait_for_a_step(root: Path, name: str, run: subprocess.Popen[str]) -> None:
    metrics, deadline = root / name / "metrics.jsonl", time.monotonic() + TIME_LIMIT_S
    while not metrics.exists() or not metrics.read_text():
        assert run.poll() is None, finish(root, name, run)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_over_a_server_that_is_killed_has_the_numbers_of_an_engine_of_our_own(root, server):
    run = start_over(root, "server", server, wait_s=600)
    wait_for_a_step(root, "server", run)
    server.kill()
    server.start()
    screen = finish(root, "server", run)
    assert server.is_running, "the run ends, the server stays"
    assert "rollout    1 server for 1 ranks" in screen
    assert f"{server.url}: SGLang " in screen
    assert "TP 1, honours seeds" in screen
    events = [json.loads(line) for line in (root / "server" / "events.jsonl").open()]
    (restart,) = [event for event in events if event["kind"] == "engine_restarted"]
    assert f"the server {server.url} is gone while" in restart["reason"]
    raw = [json.loads(line) for line in (root / "server" / "metrics.jsonl").open()]
    assert sum(row["rollout/engine_restarts"] for row in raw) == 1
    assert all(row["rollout/sync_verified"] == 15 for row in raw)
    written = [p for p in (root / "server").rglob("*") if p.suffix in (".yaml", ".jsonl", ".log")]
    assert len(written) > 3
    assert not any(KEY in path.read_text() for path in written), "the key stays a secret"
    finish(root, "own", start(root, "own"))
    assert rows(root / "server") == rows(root / "own")


def test_the_next_run_over_a_server_that_does_not_come_back_saves_and_says_so(root, server):
    run = start_over(root, "lost", server, wait_s=5)
    wait_for_a_step(root, "lost", run)
    server.kill()
    out, err = run.communicate(timeout=TIME_LIMIT_S)
    assert run.returncode == 1, out + err
    assert "EnginesLost: the engine of rank 0 is lost: the server" in err
    assert f"{server.url} was not healthy within rollout.server_wait_s 5 s" in err
    assert (root / "lost" / "checkpoints" / "latest").exists()


def test_a_dead_port_is_one_error_before_anything_is_built(root):
    run = start(root, "dead", "rollout.url=http://127.0.0.1:9", "rollout.server_wait_s=1")
    out, err = run.communicate(timeout=TIME_LIMIT_S)
    assert run.returncode == 2, out + err
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "http://127.0.0.1:9 was not healthy within rollout.server_wait_s 1 s" in errors[0]
    assert "Traceback" not in err
    assert not (root / "dead").exists()
