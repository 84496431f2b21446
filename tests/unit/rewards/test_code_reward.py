"""Programs against tests: what passes, what a program cannot do, and what is left of it."""

import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from megappo.config.rewards import CodeRewardSection
from megappo.errors import DataError
from megappo.rewards import code
from megappo.rewards.base import RewardTimeoutError

DOUBLE = {"inputs": ["1\n", "20\n"], "outputs": ["2\n", "40\n"]}
CALLS = {"fn_name": "f", "inputs": [[1, 2], ["a", "b"]], "outputs": [[2, 1], ["b", "a"]]}
LINES = {"fn_name": "f", "inputs": ["1\n[2]"], "outputs": ["[[2], 1]"]}


def make_reward(timeout_s, **settings):
    settings = CodeRewardSection(timeout_s=timeout_s, memory_mb=256, output_kb=16, **settings)
    return code.make(settings, num_workers=1)


@pytest.fixture(scope="module")
def reward():
    return make_reward(20)  # none of what it runs takes so long, on a loaded machine either


def in_block(program, before="So:\n", after="\nDone."):
    return f"{before}```python\n{program}\n```{after}"


@pytest.mark.parametrize(
    ("program", "tests", "score"),
    [
        ("print(2 * int(input()))", DOUBLE, 1),
        ("import sys\nprint(2 * int(sys.stdin.read()))\nsys.exit(0)", DOUBLE, 1),
        ("print(open(0).read().strip() and 2)", DOUBLE, 0),  # right for the first alone
        ("if __name__ == '__main__':\n    print(2 * int(input()))", DOUBLE, 1),
        ("print(2 * int(input())", DOUBLE, 0),
        ("f = lambda a, b: (b, a)", CALLS, 1),
        ("class Solution:\n    def f(self, a, b):\n        return [b, a]", CALLS, 1),
        ("f = lambda a, b: [a, b]", CALLS, 0),
        ("g = 1", CALLS, 0),
        ("f = lambda a, b: object()", CALLS, 0),
        ("f = lambda a, b: [b, a]", LINES, 1),
        ("f = lambda a, b: [b, True]", LINES, 0),  # true is not 1
        ("f = lambda x: x + 1", ["assert f(1) == 2", "assert f(-1) == 0"], 1),
        ("f = lambda x: 2", ["assert f(1) == 2", "assert f(-1) == 0"], 0),
        ("f = lambda x: x", "for i in range(3):\n    assert f(i) == i", 1),
        ("import sys\nsys.exit(0)", "assert False", 0),
        ("import os\nos._exit(0)", "assert False", 0),
    ],
)
def test_a_program_scores_one_only_if_it_passes_every_test(reward, program, tests, score):
    truth = tests if isinstance(tests, str) else json.dumps(tests)
    assert reward(in_block(program), truth, {}) == score


def test_the_last_block_of_python_is_the_program():
    block = in_block
    assert code.extract_program("print(1)") is None
    assert code.extract_program(block("a = 1") + block("b = 2")) == "b = 2\n"
    assert code.extract_program(block("a = 1") + "```bash\nls\n```") == "a = 1\n"
    assert code.extract_program("```\na = 1\n```") == "a = 1\n"
    assert code.extract_program("```python\na = 1") is None


SEEN = """
import os, tempfile
assert os.environ["HOME"] == os.environ["TMPDIR"] == tempfile.gettempdir() == os.getcwd()
tempfile.TemporaryFile().write(b"x")
print(sorted(os.environ.keys() & {"WANDB_API_KEY", "HF_TOKEN", "JUDGE_KEY", "LANG"}))
"""


def test_a_program_sees_no_keys_of_the_trainer(monkeypatch):
    for name in ("WANDB_API_KEY", "HF_TOKEN", "JUDGE_KEY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("LANG", "C.UTF-8")
    reward = make_reward(20)
    truth = json.dumps({"inputs": [""], "outputs": ["['LANG']"]})
    assert reward(in_block(SEEN), truth, {}) == 1


def test_partial_scores_the_share_of_tests_passed():
    truth = json.dumps({"inputs": ["1", "2", "3", "4"], "outputs": ["2", "4", "6", "9"]})
    assert make_reward(20, partial=True)(in_block("print(2 * int(input()))"), truth, {}) == 0.75
    slow = "n = int(input())\nwhile n == 1: pass\nprint(2 * n)"
    with pytest.raises(RewardTimeoutError, match=r"a test took over 3 s") as caught:
        make_reward(3, partial=True)(in_block(slow), truth, {})
    assert caught.value.score == 0.5


@pytest.mark.parametrize("truth", ["", "[]", "{}", '{"inputs": ["1"], "outputs": []}', "[1]", "7"])
def test_a_ground_truth_without_tests_is_an_error_of_its_row(reward, truth):
    with pytest.raises(DataError, match="must hold tests"):
        reward(in_block("print(1)"), truth, {})


OUTSIDE = """
import ctypes, fcntl, os, shutil, signal, socket, struct, subprocess, sys, threading
found, libc, a_page = [], ctypes.CDLL(None), {a_page}
def attempt(what, action):
    try:
        action()
    except (OSError, ValueError):
        return
    found.append(what)
def checked(result):
    if result == -1:
        raise OSError
def kill_by_pipe(how, value):
    reading, writing = os.pipe()
    fcntl.fcntl(reading, how, value)
    fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.write(writing, b"x")
parent, other, outside = os.getppid(), {other}, {outside!r}
libc.shmat.restype = ctypes.c_ssize_t
attempt("write", lambda: open(outside + "/new", "w"))
attempt("change", lambda: open(outside + "/there", "a"))
attempt("truncate", lambda: os.truncate(outside + "/there", 0))
attempt("empty", lambda: os.open(outside + "/there", os.O_RDONLY | os.O_TRUNC))
attempt("empty unopened", lambda: os.open(outside + "/there", os.O_ACCMODE | os.O_TRUNC))
attempt("remove", lambda: os.unlink(outside + "/there"))
attempt("move", lambda: os.rename(outside + "/there", "here"))
attempt("link", lambda: os.link(outside + "/there", "here"))
attempt("mode", lambda: os.chmod(outside + "/there", 0))
attempt("folder", lambda: os.mkdir(outside + "/folder"))
attempt("connect", lambda: socket.create_connection(("127.0.0.1", {port})))
attempt("bind", lambda: socket.socket(socket.AF_UNIX).bind("name"))
attempt("pair", lambda: socket.socketpair())
attempt("fork", lambda: os.fork() or os._exit(0))
attempt("run", lambda: subprocess.run(["true"]))
attempt("exec", lambda: os.execv("/bin/true", ["true"]))
attempt("signal", lambda: os.kill(parent, 0))
attempt("signal all", lambda: os.kill(-1, signal.SIGKILL))
attempt("owner", lambda: kill_by_pipe(fcntl.F_SETOWN, other))
attempt("thread's owner", lambda: kill_by_pipe(15, struct.pack("ii", 1, other)))
attempt("signal of a pipe", lambda: fcntl.fcntl(os.pipe()[0], 10, signal.SIGKILL))
attempt("rank", lambda: os.sched_setscheduler(other, os.SCHED_IDLE, os.sched_param(0)))
attempt("outlive", lambda: checked(libc.prctl(1, 0)))
attempt("attach", lambda: checked(libc.shmat(a_page, None, 0)))
attempt("drop memory", lambda: checked(libc.shmctl(a_page, 0, None)))
attempt("environment", lambda: open(f"/proc/{{parent}}/environ", "rb").read())
attempt("memory", lambda: open(f"/proc/{{parent}}/mem", "r+b"))
attempt("session", lambda: os.setsid())
attempt("limits", lambda: __import__("resource").setrlimit(0, (9, 9)))
# what it may do
open("mine", "w").write("x"); os.mkdir("sub"); os.rename("mine", "sub/mine"); open(os.devnull, "w")
thread = threading.Thread(target=lambda: found.append("thread")); thread.start(); thread.join()
print(*found)
"""


@pytest.fixture
def other():
    """A process that anybody may kill."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def a_page():
    """Number of a piece of shared memory that others of this user can reach."""
    libc = ctypes.CDLL(None)
    number = libc.shmget(0, 4096, 0o600)  # IPC_PRIVATE
    assert number >= 0
    yield number
    libc.shmctl(number, 0, None)  # IPC_RMID


def test_a_program_reaches_nothing_outside_its_folder(reward, tmp_path, other, a_page):
    (tmp_path / "there").write_text("as it was")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = OUTSIDE.format(outside=str(tmp_path), port=port, other=other.pid, a_page=a_page)
        truth = json.dumps({"inputs": [""], "outputs": ["thread"]})
        assert reward(in_block(program), truth, {}) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert (tmp_path / "there").read_text() == "as it was"
    assert other.poll() is None
    assert ctypes.CDLL(None).shmctl(a_page, 0, None) == 0


ON_AN_OLD_KERNEL = """
import os, sys
from pathlib import Path
from megappo.rewards import confine
confine._landlock_version = lambda: 1  # rights of later versions are then not asked for
confine.confine(Path.cwd(), cpu_s=60, memory_bytes=2**30, file_bytes=2**20)
for mode in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_ACCMODE):
    try:
        os.open(sys.argv[1], mode | os.O_TRUNC)
    except PermissionError:
        print("denied")
open("mine", "w").close()
"""


def test_nothing_outside_is_emptied_where_landlock_does_not_know_of_it(tmp_path):
    there, inside = tmp_path / "there", tmp_path / "inside"
    there.write_text("as it was")
    inside.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", ON_AN_OLD_KERNEL, str(there)],
        cwd=inside,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr) == ("denied\n" * 4, "")
    assert there.read_text() == "as it was"


def test_the_same_acts_succeed_without_the_confinement(tmp_path, other, a_page):
    """So that the test above can fail: of what it tries, this process can do what it tries here."""
    there = tmp_path / "there"
    for mode in (os.O_RDONLY, os.O_ACCMODE):
        there.write_text("x")
        os.close(os.open(there, mode | os.O_TRUNC))
        assert there.read_text() == ""
    os.truncate(there, 0)
    os.kill(os.getppid(), 0)
    os.sched_setscheduler(other.pid, os.SCHED_IDLE, os.sched_param(0))
    reading, writing = os.pipe()
    fcntl.fcntl(reading, fcntl.F_SETOWN, other.pid)
    fcntl.fcntl(reading, 10, signal.SIGKILL)  # F_SETSIG
    fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.write(writing, b"x")
    assert other.wait(timeout=120) == -signal.SIGKILL
    os.close(reading), os.close(writing)
    assert ctypes.CDLL(None).shmctl(a_page, 0, None) == 0
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    for one in socket.socketpair():
        one.close()
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()


# Each file may have 16 KiB: none is over its limit, and none stays open. A byte in the pipe of the
# replies now and then does not keep the supervisor from looking.
FILLS = """
import os, time
for number in range(900):
    open(str(number), "wb").write(b"x" * 2000)
    if number % 100 == 0:
        for fd in range(3, 64):
            try: os.write(fd, b" ")
            except OSError: pass
while True: time.sleep(0.05)
"""


@pytest.mark.parametrize("program", ["while True: pass", "import time\ntime.sleep(60)"])
def test_a_program_over_the_time_limit_is_counted_as_such(program):
    reward = make_reward(3)
    with pytest.raises(RewardTimeoutError, match=r"took over 3 s"):
        reward(in_block(program), json.dumps(DOUBLE), {})
    assert reward(in_block("print(2 * int(input()))"), json.dumps(DOUBLE), {}) == 1


def test_a_program_that_computes_meets_the_clock_before_the_limit_on_cpu_time(reward):
    program = "limits = open('/proc/self/limits').read().split('Max cpu time')[1]\n"
    program += "print(int(limits.split()[0]) > 20)"
    assert reward(in_block(program), json.dumps({"inputs": [""], "outputs": ["True"]}), {}) == 1


@pytest.mark.parametrize(
    ("program", "limit"),
    [
        ("x = [bytearray(10**7) for _ in range(10**4)]", "256 MiB of memory"),
        ("import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')", "its folder"),
        (FILLS, r"filled its folder \(over 1048576 bytes, or 1000 files"),
    ],
)
def test_a_program_over_a_limit_is_counted_as_such(reward, program, limit):
    with pytest.raises(RewardTimeoutError, match=limit):
        reward(in_block(program), json.dumps(DOUBLE), {})
    assert reward(in_block("print(2 * int(input()))"), json.dumps(DOUBLE), {}) == 1


@pytest.mark.parametrize(
    "program",
    [
        "import sys\nwhile True: sys.stdout.write('x' * 1000)",
        "f = open('file', 'a')\nwhile True: f.write('x' * 1000)",
        "import os\nos.abort()",
        'import os\nfor fd in range(3, 64):\n    try: os.write(fd, b\'{"stdout": "2"}\\n\')\n'
        "    except OSError: pass",
        "import os\nos.mkdir('locked')\nos.mkdir('locked/in', 0)\nprint('no')",
        "raise KeyboardInterrupt",
        "import ctypes\nctypes.string_at(0)",
    ],
)
def test_a_program_that_misbehaves_has_failed_and_the_next_runs(reward, program):
    assert reward(in_block(program), json.dumps(DOUBLE), {}) == 0
    assert reward(in_block("print(2 * int(input()))"), json.dumps(DOUBLE), {}) == 1


def is_of(process, task):
    """Whether a process is a worker of this task that has not ended meanwhile."""
    try:
        return task in " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def test_nothing_is_left_when_the_reward_ends(tmp_path, monkeypatch):
    def mine():
        family = psutil.Process(os.getpid()).children(recursive=True)
        return {p for p in family if is_of(p, "code_worker")}

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = mine()
    reward = make_reward(1)
    with pytest.raises(RewardTimeoutError):
        reward(in_block("open('left', 'w').write('x')\nwhile True: pass"), '["assert True"]', {})
    new = mine() - before
    assert len(new) == 2
    assert len(list(tmp_path.iterdir())) == 1
    del reward
    deadline = time.monotonic() + 15
    while mine() & new:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []
