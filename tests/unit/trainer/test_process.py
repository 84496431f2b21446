"""What a process of a run knows of its start, and what it tells on a disk without room."""

import io
import os
import time

import psutil
import pytest

from megappo.distributed.launcher_death import LAUNCHER_PID
from megappo.distributed.watchdog import HangReport
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


def test_a_hang_is_told_on_the_screen_also_where_its_report_cannot_be_written(tmp_path, capsys):
    (tmp_path / "hang_report.txt").symlink_to("/dev/full")
    found = HangReport(step=3, ranks=(1,), summary="the run hangs", text="stacks")
    Process()._report_hang(tmp_path, found)
    assert capsys.readouterr().err == (
        "the run hangs; stacks and last collectives cannot be written to "
        f"{tmp_path}/hang_report.txt: [Errno 28] No space left on device; all ranks end\n"
    )


class FullLog(io.StringIO):
    """Takes no traceback."""

    def write(self, text):
        if "Traceback" in text:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_why_a_rank_failed_is_told_also_where_its_traceback_cannot_be_written(monkeypatch):
    screen = FullLog()
    monkeypatch.setattr("sys.stderr", screen)
    try:
        raise RuntimeError("planted")
    except RuntimeError as error:
        with pytest.raises(OSError, match="No space left"):
            Process().report_failure(error)
    assert screen.getvalue() == "rank 0 failed: RuntimeError: planted\n"
