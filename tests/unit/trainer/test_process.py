"""What a process of a run knows of its start."""

import os
import time

import psutil
import pytest

from megappo.distributed.launcher_death import LAUNCHER_PID
from megappo.trainer.process import Process


@pytest.fixture
def rank_of(monkeypatch):
    """A started process whose launcher is this one."""

    def start(restarts: int) -> Process:
        for name, value in {
            "RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "TORCHELASTIC_RESTART_COUNT": restarts,
            LAUNCHER_PID: os.getpid(),
        }.items():  # fmt: skip
            monkeypatch.setenv(name, str(value))
        process = Process()
        process.start()
        return process

    return start


def test_the_wall_time_of_ranks_that_were_started_again_counts_from_the_launchers_start(rank_of):
    age_s = time.time() - psutil.Process().create_time()
    assert rank_of(1).stop_requested(age_s) == f"trainer.max_wall_time_s ({age_s:g})"


def test_the_wall_time_of_a_first_start_is_its_own(rank_of):
    assert rank_of(0).launch.launcher_age_s == 0
    assert rank_of(0).stop_requested(1e6) == ""
