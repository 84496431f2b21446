"""Comparisons that never end: killed in time, counted, replaced, and gone when the parent is."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megappo.rewards import math
from megappo.rewards.base import RewardTimeoutError
from megappo.rewards.math_pool import MathVerifier

REPOSITORY = Path(__file__).resolve().parents[3]
# Sympy multiplies it out: no time and no memory are enough.
ENDLESS = "5^{5^{5^{5^{5}}}}"


@pytest.fixture
def verifier():
    """Its limit is far from what a comparison takes on a loaded machine."""
    verifier = MathVerifier(timeout_s=30.0)
    assert verifier.equal("x+1", "1+x")
    yield verifier
    verifier.close()


@contextlib.contextmanager
def time_limit(verifier, timeout_s):
    """Inside, the verifier gives up sooner: for comparisons that must run out of time."""
    usual = verifier._pool.limits
    verifier._pool.limits = replace(usual, timeout_s=timeout_s)
    try:
        yield
    finally:
        verifier._pool.limits = usual


def in_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def is_of(process, task):
    """Whether a process is a worker of this task that has not ended meanwhile."""
    try:
        return task in " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def descendants(pid):
    """Supervisors and their comparing children, in the order of their start."""
    found = psutil.Process(pid).children(recursive=True)
    found = [process for process in found if is_of(process, "math_worker")]
    # Not by number: the kernel's begin anew after the largest.
    return sorted(found, key=lambda process: process.create_time())


@pytest.fixture
def lone_verifier():
    """A verifier of one worker, with its supervisor and its comparing child."""
    before = set(descendants(os.getpid()))
    verifier = MathVerifier(timeout_s=60.0, num_workers=1)
    assert verifier.equal("x+1", "1+x")
    supervisor, child = [p for p in descendants(os.getpid()) if p not in before]
    assert child.ppid() == supervisor.pid
    yield verifier, supervisor, child
    verifier.close()


@pytest.mark.parametrize("tower", [ENDLESS, "5^(5^(5^(5^5)))"])
def test_a_tower_of_powers_scores_zero_and_ends_off_the_main_thread(tower):
    math.score("\\boxed{x+1}", "1+x")  # starts the process
    start = time.monotonic()
    assert in_thread(lambda: math.score(f"\\boxed{{{tower}}}", "5")) == 0.0
    assert time.monotonic() - start < 30.0


def test_endless_comparisons_in_a_row_each_end_and_leave_no_process(verifier):
    def one():
        start = time.monotonic()
        with pytest.raises(RewardTimeoutError, match=r"took over 2\.0 s"):
            math.check(f"\\boxed{{{ENDLESS}}}", "5", verifier=verifier)
        return time.monotonic() - start

    before = descendants(os.getpid())
    with time_limit(verifier, 2.0):
        durations = in_thread(lambda: [one() for _ in range(4)])
    assert max(durations) < 30.0
    assert verifier.num_timeouts == 4
    assert verifier.equal("2x", "x+x")
    after = descendants(os.getpid())
    assert len(after) == len(before)
    assert all(process.status() != psutil.STATUS_ZOMBIE for process in after)


def test_threads_share_the_pool_and_get_their_own_answers(verifier):
    pairs = [(f"{n}x + x", f"{n + 1}x") for n in range(20)]
    pairs += [(f"{n}x + x", f"{n + 2}x") for n in range(20)]
    with ThreadPoolExecutor(8) as pool:
        equal = list(pool.map(lambda pair: verifier.equal(*pair), pairs))
    assert equal == [True] * 20 + [False] * 20


@pytest.mark.parametrize("victim", ["supervisor", "child"])
def test_a_process_that_was_killed_while_idle_is_replaced(lone_verifier, victim):
    verifier, supervisor, child = lone_verifier
    killed = {"supervisor": supervisor, "child": child}[victim]
    killed.kill()
    wait_until(lambda: not is_running(killed))
    assert verifier.equal("x+1", "1+x")
    assert verifier.num_timeouts == 0


def test_slurms_warning_which_reaches_every_process_of_a_job_leaves_it_alone(lone_verifier):
    verifier, supervisor, child = lone_verifier
    for process in (supervisor, child):
        process.send_signal(signal.SIGUSR1)
    assert verifier.equal("x+1", "1+x")
    assert is_running(supervisor)
    assert is_running(child)


@pytest.mark.parametrize(
    ("victim", "message"),
    [
        ("supervisor", "ended by itself with status -9 at work"),
        ("child", r"math-verify failed on 5.*ended with status -9"),
    ],
)
def test_a_process_that_is_lost_while_comparing_is_an_error(lone_verifier, victim, message):
    verifier, supervisor, child = lone_verifier
    killer = threading.Timer(2.0, {"supervisor": supervisor, "child": child}[victim].kill)
    killer.start()
    with pytest.raises(RuntimeError, match=message) as caught:
        verifier.equal(ENDLESS, "5")
    killer.join()
    assert not isinstance(caught.value, RewardTimeoutError)
    assert verifier.equal("x+1", "1+x")
    wait_until(lambda: not is_running(child))  # also where it has nobody left to kill it


def test_a_killed_comparison_is_replaced_by_a_fork_not_by_a_new_start(verifier):
    [supervisor, *_] = mine = descendants(os.getpid())[-2:]
    with time_limit(verifier, 2.0), pytest.raises(RewardTimeoutError):
        verifier.equal(ENDLESS, "5")
    wait_until(lambda: descendants(os.getpid())[-1] not in mine)  # the fork takes a moment
    assert descendants(os.getpid())[-2] == supervisor


def test_a_second_process_starts_only_when_the_first_is_busy(verifier):
    before = len(descendants(os.getpid()))
    for _ in range(3):
        assert verifier.equal("x+1", "1+x")
    assert len(descendants(os.getpid())) == before


def test_an_unreadable_ground_truth_is_an_error_not_a_zero(verifier):
    with pytest.raises(RuntimeError, match="no expression in the ground truth"):
        verifier.equal("1+x", " ")
    assert verifier.equal("x+1", "1+x")


def test_long_answers_pass_through_the_pipe(verifier):
    assert not verifier.equal("\\text{" + "word " * 40_000 + "}", "1+x")


def test_close_ends_all_processes_and_the_next_comparison_starts_anew(lone_verifier):
    verifier, supervisor, child = lone_verifier
    verifier.close()
    wait_until(lambda: not is_running(supervisor) and not is_running(child))
    assert verifier.equal("x+1", "1+x")


def test_a_forgotten_verifier_takes_its_processes_along():
    before = set(descendants(os.getpid()))
    verifier = MathVerifier(timeout_s=60.0)
    assert verifier.equal("x+1", "1+x")
    mine = set(descendants(os.getpid())) - before
    assert len(mine) == 2
    del verifier
    gc.collect()
    wait_until(lambda: not any(is_running(process) for process in mine))


PARENT = """
import threading, time
from megappo.rewards.math_pool import MathVerifier
verifier = MathVerifier(timeout_s=30.0)
verifier.equal("x+1", "1+x")
threading.Thread(target=verifier.equal, args=(ANSWER, "5"), daemon=True).start()
time.sleep(0.5)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("answer", ["1+x", ENDLESS])
@pytest.mark.parametrize("victims", ["trainer", "trainer and supervisor"])
def test_no_process_outlives_a_trainer_that_was_killed(answer, victims):
    trainer = subprocess.Popen(
        [sys.executable, "-c", PARENT.replace("ANSWER", repr(answer))],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdout.readline() == "ready\n"
    supervisor, child = descendants(trainer.pid)
    os.kill(trainer.pid, signal.SIGKILL)
    if victims == "trainer and supervisor":
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have seen the end already
            supervisor.kill()
    trainer.wait()
    trainer.stdout.close()
    wait_until(lambda: not is_running(supervisor) and not is_running(child))


def wait_until(condition):
    deadline = time.monotonic() + 15.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


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
