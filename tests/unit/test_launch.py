"""What the launcher makes of its ranks' exit codes, after a failure and after a signal."""

import os
import signal
import socket
import subprocess
import sys
import time
from unittest.mock import patch

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megappo.launch import _code_after_signal, _was_killed, run_program


def failure(exitcode: int, *, second: int) -> ProcessFailure:
    made = ProcessFailure(local_rank=0, pid=17, exitcode=exitcode, error_file="none")
    made.timestamp = second
    return made


@pytest.mark.parametrize(
    ("exitcode", "second", "expected"),
    [
        (-9, 100, True),
        (-11, 101, True),
        (-15, 100, False),  # the launcher's own, after another rank's failure
        (-9, 131, False),  # the launcher's own, half a minute later
        (1, 100, False),
    ],
)
def test_a_rank_was_killed_if_the_launcher_did_not_send_the_signal(exitcode, second, expected):
    first = failure(1, second=100)
    assert _was_killed(failure(exitcode, second=second), first) is expected


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([75, 75], 75),
        ([0, 0], 0),
        ([1, 1], 1),
        ([75, 1], 1),
        ([3, 3], 3),
        ([1, 3], 3),
        ([-9, 75], 1),  # in the middle of a save
        ([-10, 1], 75),  # while they started: the other lost its peer
        ([None, 75], 75),  # a second signal
        ([], 75),  # before there were ranks
    ],
)
def test_after_a_signal_only_what_can_go_on_is_75(codes, expected):
    assert _code_after_signal(codes, signal.SIGUSR1) == expected


RANK = """\
import os, pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(int(sys.argv[2 + int(os.environ["RANK"])])))
pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
time.sleep(60)
"""


# Before it watches its ranks it may not yet know those that it has started, and ends with 75.
LAUNCHER = """\
import pathlib, sys
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from megappo.launch import run_program
look = LocalElasticAgent._monitor_workers
def told(agent, group):
    pathlib.Path(sys.argv[2], "launcher").touch()
    return look(agent, group)
LocalElasticAgent._monitor_workers = told
sys.exit(run_program(["--standalone", "--nproc-per-node", "2"], sys.argv[1:]))
"""


def test_the_ranks_own_codes_reach_the_caller_of_a_signalled_launcher(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    started = {}
    for codes in (("75", "75"), ("75", "1")):
        ready = tmp_path / "-".join(codes)
        ready.mkdir()
        started[ready] = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(script), str(ready), *codes],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    deadline = time.monotonic() + 120
    for ready, launcher in started.items():
        while len(list(ready.iterdir())) < 3:
            assert launcher.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        launcher.send_signal(signal.SIGUSR1)
    assert [launcher.wait(timeout=60) for launcher in started.values()] == [75, 1]


def test_a_node_that_does_not_come_to_the_rendezvous_ends_it_with_a_message(capfd):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    options = [
        "--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=x",
        "--rdzv-conf=is_host=true,join_timeout=1",
    ]  # fmt: skip
    with patch.dict(os.environ):
        assert run_program(options, ["none.py"]) == 1
    assert "failed: the nodes do not come together (again)" in capfd.readouterr().err
