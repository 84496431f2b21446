"""Signals, in a process of their own: they would end the tests."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
from megappo.trainer import signals
clock = [100.0]
signals.time.monotonic = lambda: clock[0]
asked = signals.StopSignals()
asked.catch()
assert asked.name == ""
for number, seconds in {plan}:
    clock[0] += seconds
    os.kill(os.getpid(), number)
    sys.stdout.write(asked.name + " ")
    sys.stdout.flush()
"""
TERM, INT, USR1 = int(signal.SIGTERM), int(signal.SIGINT), int(signal.SIGUSR1)


@pytest.mark.parametrize(
    ("plan", "names", "code"),
    [
        ([(USR1, 0), (USR1, 0.1), (USR1, 60)], "SIGUSR1 SIGUSR1 SIGUSR1 ", 0),
        ([(TERM, 0), (TERM, 1.9)], "SIGTERM SIGTERM ", 0),
        ([(TERM, 0), (TERM, 2.1)], "SIGTERM ", -TERM),
        ([(USR1, 0), (INT, 2.1)], "SIGUSR1 ", -INT),
    ],
    ids=["warnings", "one request twice", "a second request", "another signal"],
)
def test_a_later_second_signal_ends_the_process_and_one_request_told_twice_does_not(
    plan, names, code
):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(plan=plan)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == (names, code), done.stderr
