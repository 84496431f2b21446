"""Comparisons that never end: killed in time, counted, replaced, and gone when the parent is."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from megappo.rewards import math
from megappo.rewards.base import RewardTimeoutError
from megappo.rewards.math_pool import MathVerifier

REPOSITORY = Path(__file__).resolve().parents[3]
# Sympy multiplies it out: no time and no memory are enough.
ENDLESS = "5^{5^{5^{5^{5}}}}"


@pytest.fixture(scope="module")
def allowed_s():
    # A time limit of 2 s has to return within 4 s. What a start costs on this machine comes on top:
    # on a busy one the replacement of a killed process is not up in time.
    start = time.monotonic()
    verifier = MathVerifier(timeout_s=60.0, num_workers=1)
    assert verifier.equal("x+1", "1+x")
    verifier.close()
    return 4.0 + time.monotonic() - start


@pytest.fixture
def verifier():
    verifier = MathVerifier(timeout_s=2.0)
    # The first start is not under the time limit of a comparison.
    assert all(verifier.equal("x+1", "1+x") for _ in range(2))
    yield verifier
    verifier.close()


def in_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def workers_of(pid):
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if "math_worker" in " ".join(child.cmdline())]


@pytest.mark.parametrize("tower", [ENDLESS, "5^(5^(5^(5^5)))"])
def test_a_tower_of_powers_scores_zero_in_time_off_the_main_thread(tower, allowed_s):
    math.score("\\boxed{x+1}", "1+x")  # starts the process
    start = time.monotonic()
    assert in_thread(lambda: math.score(f"\\boxed{{{tower}}}", "5")) == 0.0
    assert time.monotonic() - start < allowed_s


def test_endless_comparisons_in_a_row_each_return_in_time_and_leave_no_process(verifier, allowed_s):
    def one():
        start = time.monotonic()
        with pytest.raises(RewardTimeoutError, match=r"no reply within 2\.0 s"):
            math.check(f"\\boxed{{{ENDLESS}}}", "5", verifier=verifier)
        return time.monotonic() - start

    others = {child.pid for child in workers_of(os.getpid())}
    durations = in_thread(lambda: [one() for _ in range(4)])
    assert max(durations) < allowed_s
    assert verifier.num_timeouts == 4
    assert verifier.equal("2x", "x+x")
    left = workers_of(os.getpid())
    assert len(left) == len(others)
    assert all(child.status() != psutil.STATUS_ZOMBIE for child in left)


def test_threads_share_the_pool_and_get_their_own_answers(verifier):
    pairs = [(f"{n}x + x", f"{n + 1}x") for n in range(20)]
    pairs += [(f"{n}x + x", f"{n + 2}x") for n in range(20)]
    with ThreadPoolExecutor(8) as pool:
        equal = list(pool.map(lambda pair: verifier.equal(*pair), pairs))
    assert equal == [True] * 20 + [False] * 20


def test_a_process_that_was_killed_while_idle_is_replaced(verifier):
    for child in workers_of(os.getpid()):
        child.kill()
        psutil.wait_procs([child], timeout=10)
    assert verifier.equal("x+1", "1+x")
    assert verifier.num_timeouts == 0


def test_a_process_that_ends_during_a_comparison_is_an_error_and_is_replaced():
    verifier = MathVerifier(timeout_s=60.0, num_workers=1)
    before = {child.pid for child in workers_of(os.getpid())}
    assert verifier.equal("x+1", "1+x")
    [mine] = [child for child in workers_of(os.getpid()) if child.pid not in before]
    killer = threading.Timer(0.5, mine.kill)
    killer.start()
    with pytest.raises(RuntimeError, match=r"ended by itself with status -9 while comparing"):
        verifier.equal(ENDLESS, "5")
    killer.join()
    assert verifier.equal("x+1", "1+x")
    verifier.close()


def test_an_unreadable_ground_truth_is_an_error_not_a_zero(verifier):
    with pytest.raises(RuntimeError, match="no expression in the ground truth"):
        verifier.equal("1+x", " ")
    assert verifier.equal("x+1", "1+x")


def test_long_answers_pass_through_the_pipe(verifier):
    assert not verifier.equal("\\text{" + "word " * 40_000 + "}", "1+x")


def test_close_ends_all_processes_and_the_next_comparison_starts_anew():
    before = {child.pid for child in workers_of(os.getpid())}
    verifier = MathVerifier(timeout_s=60.0)
    assert verifier.equal("x+1", "1+x")
    verifier.close()
    assert {child.pid for child in workers_of(os.getpid())} <= before
    assert verifier.equal("x+1", "1+x")
    verifier.close()


PARENT = """
import threading, time
from megappo.rewards.math_pool import MathVerifier
verifier = MathVerifier(timeout_s=3.0)
verifier.equal("x+1", "1+x"), verifier.equal("x+1", "1+x")
threading.Thread(target=verifier.equal, args=(ANSWER, "5"), daemon=True).start()
time.sleep(0.5)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("answer", ["1+x", ENDLESS])
def test_no_process_outlives_a_parent_that_was_killed(answer):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.replace("ANSWER", repr(answer))],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout.readline() == "ready\n"
    workers = workers_of(parent.pid)
    assert len(workers) == 2
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 15.0
    while any(is_running(worker) for worker in workers):
        assert time.monotonic() < deadline, workers
        time.sleep(0.1)


def is_running(process):
    # Whether an orphan is reaped is up to the init process, so a zombie counts as ended.
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_process_does_not_import_torch():
    code = (
        "import sys, megappo.rewards.math_worker as w; w._compare(answer='x+1', wanted='1+x'); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
