"""Start, restart, death and end of engines, in a process of their own (`lifecycle_worker.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

# Five engines start one after another; on a loaded machine each takes a minute.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

HERE = Path(__file__).parent
PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


@pytest.fixture(scope="module")
def facts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("lifecycle")
    done = subprocess.run(
        [sys.executable, HERE / "lifecycle_worker.py", tiny_model, folder],
        env={
            **os.environ,
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            **dict.fromkeys(PROXIES, "http://127.0.0.1:9"),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert (folder / "facts.json").exists(), done.stdout + done.stderr
    return {**json.loads((folder / "facts.json").read_text()), "output": done.stdout + done.stderr}


def test_a_restarted_engine_repeats_tokens_and_log_probs_bit_for_bit(facts):
    assert len(facts["first_run"]) == 64
    assert facts["second_run"] == facts["first_run"]
    assert facts["third_run"] == facts["first_run"]


def test_signals_that_reach_every_process_of_a_job_leave_the_engine_alone(facts):
    assert facts["blocked_signals"]
    for blocked in facts["blocked_signals"]:
        assert {"SIGUSR1", "SIGTERM", "SIGINT"} <= set(blocked)


def test_a_start_whose_port_was_taken_meanwhile_is_tried_again(facts):
    assert facts["port"] > facts["stolen_port"]


def test_the_trainers_process_is_as_before(facts):
    assert facts["state_before"]["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert facts["state_after_shutdown"] == facts["state_before"]
    assert facts["state_after_deaths"] == facts["state_before"]


def test_shutdown_leaves_no_process_and_no_file(facts):
    assert len(facts["children_after_shutdown"]) == 1, "the bystander"
    assert facts["children_after_deaths"] == []
    assert not facts["socket_folder_exists"]


def test_shutdown_spares_the_trainers_other_children(facts):
    assert facts["bystander_lives"]


@pytest.mark.parametrize("when", ["killed_while_generating", "killed_while_idle"])
def test_a_death_is_an_exception_long_before_the_time_limit(facts, when):
    assert "exit code -9" in facts[when]["message"]
    assert facts[when]["seconds"] < facts["timeout_s"] / 2


def test_an_engine_that_hangs_is_an_exception_after_the_time_limit_and_at_once_from_then_on(facts):
    assert "did not answer within 3 s while generating" in facts["hung_while_generating"]["message"]
    assert 3 <= facts["hung_while_generating"]["seconds"] < facts["timeout_s"] / 2
    assert "did not answer within 3 s" in facts["asked_after_it_hung"]["message"]
    assert facts["asked_after_it_hung"]["seconds"] < 3


def test_a_generation_longer_than_the_time_limit_is_left_alone_while_tokens_come(facts):
    assert facts["a_long_generation_goes_on"]


def test_the_engine_writes_to_its_log_and_not_to_the_screen(facts):
    assert "Load weight end" not in facts["output"]
    assert "exception" not in facts["output"].lower()


def test_a_killed_trainer_takes_its_engine_along(facts):
    deadline = time.monotonic() + 60
    while any(map(is_running, facts["last_pids"])) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(map(is_running, facts["last_pids"]))


def is_running(pid: int) -> bool:
    # Whether an orphan is reaped is up to the init process, so a zombie counts as ended.
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
