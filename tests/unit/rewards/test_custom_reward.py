"""A user's own function: its signature, its mistakes, its limits, and nothing left of it."""

import gc
import os
import re
import signal
import time

import psutil
import pytest

from megappo.config.rewards import CustomRewardSection, RewardSection
from megappo.errors import UserError
from megappo.rewards import custom
from megappo.rewards.scorer import Scorer

FUNCTIONS = '''
"""Rewards that behave well, and rewards that do not."""
import asyncio, os, sys, time

print("the file is loaded")

def good(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "more": "words"}

def numbered(response, extra_info):
    return float(response) + extra_info["level"] + extra_info["response_tokens"]

async def waits(response, ground_truth):
    await asyncio.sleep(0.3)
    if response == "3":
        raise KeyError("three")
    return float(response)

async def hangs_at_times(response):
    if response == "hangs":
        await asyncio.sleep(600)
    if response == "hangs in a thread":
        await asyncio.to_thread(time.sleep, 600)
    if response == "blocks":
        time.sleep(600)
    if response == "cancels itself":
        raise asyncio.CancelledError("by itself")
    return float(response)

def forgets(response):
    """Leaves processes that have ended, or one that goes on."""
    for _ in range(101 if response == "many" else 1):
        pid = os.fork()
        if pid == 0:
            time.sleep(600 * (response == "goes on"))
            os._exit(0)
        if response != "goes on":
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return 1.0

def orphans(response):
    """Leaves a process that ends once nobody is there who would wait for it."""
    if response == "orphan":
        pid = os.fork()
        if pid == 0:
            os.fork() or time.sleep(0.01)
            os._exit(0)
        os.waitpid(pid, 0)
    return 1.0

def batch(data_sources, solution_strs, ground_truths, extra_infos):
    assert len(solution_strs) == len(ground_truths) == len(extra_infos) == len(data_sources)
    return [float(text) for text in solution_strs]

async def async_batch(responses):
    await asyncio.sleep(0)
    return [float(text) + 1 for text in responses]

def huge_batch(responses):
    return [10 ** int(text) for text in responses]

def short_batch(responses):
    return [1.0]

def naughty(response):
    if response == "hangs":
        while True: pass
    if response == "sleeps with signals off":
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if response == "prints":
        print("{\\"scores\\": [[99, \\"\\"]]}"); sys.stdout.flush(); os.write(1, b"noise")
    if response == "eats":
        return len([bytearray(10**8) for _ in range(10**5)])
    if response == "exits":
        os._exit(0)
    if response == "dies":
        os.kill(os.getpid(), 9)
    if response == "forks":
        if os.fork() == 0:
            return 99.0
    if response == "leaves a process":
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
    if response == "forks and forks":
        while True:
            if os.fork() == 0:
                time.sleep(600)
            time.sleep(0.01)
    return {"none": None, "nan": float("nan"), "text": "1"}.get(response, 1.0)

def other_names(text, truth):
    return 1.0

def mixes(responses, ground_truth):
    return 1.0

def blind(ground_truth):
    return 1.0

not_a_function = 3
'''


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("custom") / "my_rewards.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def scorer_of(path):
    def make(name, *, max_error_rate=0.0, num_threads=4, **settings):
        section = CustomRewardSection(path=str(path), name=name, **settings)
        return Scorer(
            RewardSection(
                custom=section,
                sources={"*": "custom"},
                max_error_rate=max_error_rate,
                num_threads=num_threads,
            )
        )

    return make


def rows(*responses, truth="1"):
    return [("mine", r, truth, {"level": 10, "response_tokens": 100}) for r in responses]


def is_of(process, task):
    """Whether a process is a worker of this task that has not ended meanwhile."""
    try:
        return task in " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def workers():
    mine = psutil.Process(os.getpid()).children(recursive=True)
    return [p for p in mine if is_of(p, "custom_worker")]


def has_ended(process):
    """Whether nobody has waited for its end yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_functions_of_one_sample_are_called_by_the_names_of_their_parameters(scorer_of):
    assert scorer_of("good").score(rows("1", "2")).scores == [1.0, 0.0]
    assert scorer_of("numbered").score(rows("1", "2")).scores == [111.0, 112.0]


def test_an_async_function_runs_for_a_whole_group_at_once(scorer_of):
    waits = scorer_of("waits", max_error_rate=0.1)
    waits.score(rows("0"))  # starts the process
    started = time.monotonic()
    result = waits.score(rows(*map(str, range(40))))
    assert time.monotonic() - started < 40 * 0.3 - 1  # less than one after another
    assert result.scores == [0.0 if n == 3 else float(n) for n in range(40)]
    assert (result.errors, result.timeouts) == (1, 0)


def test_a_sample_that_hangs_in_an_async_function_fails_alone(scorer_of, caplog):
    reward = scorer_of("hangs_at_times", max_error_rate=1.0, timeout_s=0.2)
    for _ in range(2):  # the second call has another process
        result = reward.score(rows("1", "hangs", "2", "hangs in a thread", "cancels itself", "3"))
        assert result.scores == [1.0, 0.0, 2.0, 0.0, 0.0, 3.0]
        assert result.failed == [False, True, False, True, True, False]
        assert result.timeouts == 2
    assert re.search(r"hangs_at_times of .*my_rewards.py took over 0\.2 s: mend it", caplog.text)
    assert "CancelledError: by itself (my_rewards.py:" in caplog.text


def test_one_that_blocks_the_others_of_its_call_fails_with_them(scorer_of, monkeypatch):
    monkeypatch.setattr(custom, "ANSWER_MARGIN_S", 0.1)
    result = scorer_of("hangs_at_times", max_error_rate=1.0, timeout_s=0.2).score(
        rows("1", "blocks", "2")
    )
    assert (result.errors, result.timeouts) == (3, 3)


def test_processes_that_a_reward_leaves_count_in_its_next_calls_until_they_end(scorer_of):
    limits = {"max_error_rate": 1.0, "max_processes": 4, "num_threads": 1}
    assert scorer_of("forgets", **limits).score(rows(*["ended"] * 12)).errors == 0
    # Itself and three others are four; with the next one all are ended.
    result = scorer_of("forgets", **limits).score(rows(*["goes on"] * 8))
    assert result.scores == [1.0, 1.0, 1.0, 0.0] * 2
    assert result.timeouts == 2


def test_processes_that_have_ended_and_belong_to_nobody_are_taken_in(scorer_of):
    before = workers()
    reward = scorer_of("orphans", max_processes=64, num_threads=1)
    reward.score(rows(*["orphan"] * 10))
    (supervisor,) = (p for p in workers() if p not in before and p.ppid() == os.getpid())
    deadline = time.monotonic() + 60
    while any(map(has_ended, supervisor.children())):
        assert time.monotonic() < deadline
        reward.score(rows("well"))


def test_a_reward_that_waits_for_none_of_its_processes_has_a_limit_too(scorer_of):
    reward = scorer_of("forgets", max_processes=4, num_threads=1)
    with pytest.raises(RuntimeError, match=r"forgets of .* left \d+ ended processes that it never"):
        reward.score(rows("many"))


def test_a_signal_that_stops_the_run_leaves_a_reward_at_work_alone(scorer_of):
    before = set(workers())  # those of a test before may still be ending
    waits = scorer_of("waits")
    waits.score(rows("0"))
    mine = set(workers()) - before
    assert len(mine) == 2
    for process in mine:
        if process.ppid() == os.getpid():
            process.terminate()
            process.send_signal(signal.SIGINT)
        else:
            assert os.getsid(process.pid) == process.pid  # so a group's signal passes it by
    assert waits.score(rows("1")).scores == [1.0]
    assert mine <= set(workers())


@pytest.mark.parametrize(("name", "more"), [("batch", 0), ("async_batch", 1)])
@pytest.mark.parametrize("batch_size", [0, 2])
def test_a_batch_function_gets_lists(scorer_of, name, more, batch_size):
    result = scorer_of(name, batch_size=batch_size).score(rows("1", "2", "3"))
    assert result.scores == [1.0 + more, 2.0 + more, 3.0 + more]


def test_a_batch_of_the_wrong_length_is_an_error_of_all_its_samples(scorer_of):
    with pytest.raises(RuntimeError, match=r"2 of 2 rewards.*1 scores came back for 2 samples"):
        scorer_of("short_batch").score(rows("1", "2"))


def test_a_number_too_large_is_an_error_of_its_sample_alone(scorer_of):
    huge = scorer_of("huge_batch", max_error_rate=0.5)
    result = huge.score(rows("1", "400"))
    assert (result.scores, result.errors) == ([10.0, 0.0], 1)
    with pytest.raises(RuntimeError, match=r"2 of 2 rewards failed.*OverflowError"):
        huge.score(rows("400", "401"))


def test_each_thing_a_reward_does_wrong_ends_as_documented_and_leaves_no_process(scorer_of):
    naughty = scorer_of("naughty", max_error_rate=1.0, timeout_s=6, memory_mb=1024, max_processes=8)
    errors = ["hangs", "sleeps with signals off", "eats", "exits", "dies", "forks and forks"]
    errors += ["none", "nan", "text"]
    fine = ["well", "prints", "forks", "leaves a process", "well"]
    result = naughty.score(rows(*fine, *errors, *fine))
    assert result.scores == [1.0] * 5 + [0.0] * 9 + [1.0] * 5
    assert (result.errors, result.timeouts) == (9, 4)
    assert result.per_part == {("mine", "custom"): (10.0, 10)}
    assert workers()
    del naughty
    gc.collect()  # errors hold the frames that they came through
    deadline = time.monotonic() + 15
    while workers():
        assert time.monotonic() < deadline, workers()
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("response", "cause"),
    [
        ("hangs", r"RewardHungError: naughty of .*my_rewards.py took over 0\.5 s: mend it, or"),
        ("none", r"TypeError: a reward must return one number, got None \(NoneType\)"),
        ("exits", r"its process ended with status 0"),
    ],
)
def test_above_the_rate_the_message_says_what_happened(scorer_of, response, cause):
    timeout_s = 0.5 if response == "hangs" else 30
    with pytest.raises(RuntimeError, match="1 of 1 rewards failed.*" + cause):
        scorer_of("naughty", timeout_s=timeout_s).score(rows(response))


def test_an_exception_is_named_with_its_line_in_the_users_file(scorer_of):
    with pytest.raises(RuntimeError, match=r"KeyError: 'three' \(my_rewards.py:\d+ in waits\)"):
        scorer_of("waits").score(rows("3"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", r"name is 'absent': .* has no such function; it has: good, numbered"),
        ("not_a_function", "has no such function"),
        ("other_names", "has the parameter 'text': its parameters are named data_source, response"),
        ("mixes", r"mixes one sample and a batch \(responses, ground_truth\)"),
        ("blind", "takes no response"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_at_start(path, name, message):
    with pytest.raises(UserError, match=message):
        custom.make(CustomRewardSection(path=str(path), name=name), num_workers=1)


def test_a_file_that_is_missing_or_broken_is_refused_at_start(tmp_path):
    with pytest.raises(UserError, match="path is '': no such file"):
        custom.make(CustomRewardSection(), num_workers=1)
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_like_this\n")
    with pytest.raises(UserError, match=r"ModuleNotFoundError: .*\(broken.py:1 in <module>\)"):
        custom.make(CustomRewardSection(path=str(broken)), num_workers=1)
