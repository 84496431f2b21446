"""Kill -9 at any moment of a save leaves the checkpoint before it, or the new one, whole."""

import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from megappo.checkpoint import layout
from tests.distributed.launch import ROOT, WORKERS
from tests.tiny_run import make_run

pytestmark = pytest.mark.distributed

KILLS = 4


def start(config, out, log):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(WORKERS / "killed_save.py"), "--config", str(config)]
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, "--out", str(out)], stdout=stream, stderr=subprocess.STDOUT, env=environment
        )
    deadline = time.monotonic() + 240
    # A whole line: "already" has the word too, and a part of one may be read.
    while (ready := re.search(r"^ready (\d+)\n", log.read_text(), re.MULTILINE)) is None:
        assert process.poll() is None, log.read_text()
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"not ready: {log.read_text()}")
        time.sleep(0.02)
    return process, int(ready.group(1))


def named_step(out):
    """What `latest` names, which a new checkpoint becomes a moment after it is there; else 0."""
    pointer = out / layout.LATEST
    return int(pointer.read_text().strip().partition("_")[2]) if pointer.exists() else 0


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_a_save_that_is_killed_leaves_a_whole_checkpoint(tmp_path):
    config = make_run(tmp_path)
    out = tmp_path / "checkpoints"
    steps = []
    for number in range(KILLS + 1):
        process, resumed = start(config, out, tmp_path / f"{number}.log")
        steps.append(resumed)
        try:
            deadline = time.monotonic() + 120
            while named_step(out) <= resumed:
                assert time.monotonic() < deadline
                assert process.poll() is None, (tmp_path / f"{number}.log").read_text()
                time.sleep(0.005)
            time.sleep(random.uniform(0.0, 0.3))
        finally:
            kill(process)
        latest = layout.latest(out)
        assert latest is not None
        assert layout.read_state(latest)["step"] > resumed
    assert steps == sorted(set(steps)), "each start went on from a newer checkpoint"
