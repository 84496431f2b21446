"""A rank whose launcher is gone ends, also if that happened before the rank could ask for it."""

import contextlib
import ctypes
import multiprocessing
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import psutil
import pytest

from megappo.distributed.launcher_death import LAUNCHER_PID

RANK = """
import os, sys, time
from megappo.distributed.launcher_death import die_with_launcher
print(os.getpid(), flush=True)
if sys.argv[1] == "late":
    while os.getppid() == int(os.environ["TEST_LAUNCHER"]):
        time.sleep(0.01)
die_with_launcher()
print("asked", flush=True)
time.sleep(60)
"""
LAUNCHER = """
import os, subprocess, sys
me = str(os.getpid())
os.environ |= {"TORCHELASTIC_RUN_ID": "none", "TEST_LAUNCHER": me, sys.argv[3]: me}
subprocess.run([sys.executable, "-c", *sys.argv[1:3]])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's part is Linux's")
@pytest.mark.parametrize("when", ["early", "late"])
def test_a_rank_ends_with_a_launcher_that_was_killed(when):
    """`late`: the launcher is gone before the rank has imported what it needs to ask."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK, when, LAUNCHER_PID],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    rank = psutil.Process(int(launcher.stdout.readline()))
    try:
        if when == "early":
            assert launcher.stdout.readline() == "asked\n"
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        deadline = time.monotonic() + 30
        while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the rank outlived its launcher"
            time.sleep(0.01)
        assert launcher.stdout.read() == ""  # a late one ended instead of going on
    except psutil.NoSuchProcess:  # between the two questions
        assert launcher.stdout.read() == ""
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()


def signal_at_the_parents_end(connection):
    asked = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(asked))  # PR_GET_PDEATHSIG
    connection.send((asked.value, "torch" in sys.modules))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's part is Linux's")
@pytest.mark.parametrize(
    ("program", "asked"), [("megappo.train", int(signal.SIGKILL)), ("megappo.registry", 0)]
)
def test_a_process_of_an_engine_asks_for_its_end_with_nothing_large_imported(
    monkeypatch, program, asked
):
    """multiprocessing has it load the main program of its parent first, and SGLang then."""
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", find_spec(program))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=signal_at_the_parents_end, args=(theirs,))
    process.start()
    assert ours.poll(60)
    assert ours.recv() == (asked, False)
    process.join()
