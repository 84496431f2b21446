"""launch/node.sh on two machines with addresses of their own: what goes well, and each mistake."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.e2e.conftest import ranks_of
from tests.e2e.test_run import metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

LIMIT_S = 300
"""For a mistake to be told; on an idle machine each takes a fraction of it."""
PORT = 29511
SOON = "trainer.node_wait_s=5"


def start(two_nodes, number, arguments, *, command=("bash", "launch/node.sh"), **environment):
    """A node's launcher, as a user starts it there."""
    values = {
        "NNODES": "2", "NODE_RANK": str(number), "MASTER_ADDR": two_nodes.nodes[0].address,
        "MASTER_PORT": str(PORT), "GPUS_PER_NODE": "1", "OMP_NUM_THREADS": "1",
    } | environment  # fmt: skip
    return subprocess.Popen(
        two_nodes.nodes[number].command([*command, *arguments]),
        env=os.environ | {k: v for k, v in values.items() if v}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process, timeout_s=900):
    """Exit code, stdout and stderr; in a failing test nothing is left running."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"still running after {timeout_s} s:\n{out}\n{err}")
    return process.returncode, out, err


def refused(*processes):
    """Messages of launchers that must end by themselves, without a traceback."""
    found = [finish(process, LIMIT_S) for process in processes]
    for _, out, err in found:
        assert "Traceback" not in out + err
    return [code for code, _, _ in found], [err for _, _, err in found]


def test_a_run_over_two_nodes_whose_rank_is_killed_starts_again_on_both(two_nodes):
    run_dir = two_nodes.root / "restarted"
    arguments = two_nodes.arguments("restarted")
    nodes = [start(two_nodes, n, arguments, MAX_RESTARTS="1") for n in (0, 1)]
    deadline = time.monotonic() + 900
    while not (run_dir / "checkpoints" / "latest").exists():
        assert time.monotonic() < deadline
        assert all(n.poll() is None for n in nodes), [finish(n) for n in nodes]
        time.sleep(0.05)
    (victim,) = (p for p in ranks_of(run_dir) if p.ppid() == nodes[1].pid)
    victim.send_signal(signal.SIGKILL)
    (code, out, err), (code1, out1, err1) = map(finish, nodes)
    assert (code, code1) == (0, 0), f"{out}{err}{out1}{err1}"
    assert "of 2: all are there and alike" in out
    assert re.search(
        r"nodes      2, alike: config and versions \w{12}, torch .*; gloo on eth0", out
    )
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    resumed = [json.loads(line) for line in lines if '"resumed"' in line]
    assert [event["restarts"] for event in resumed] == [1]
    assert metrics(run_dir) == two_nodes.undisturbed


def test_missing_variables_are_named(two_nodes):
    process = start(two_nodes, 1, ["x.yaml"], NNODES="", MASTER_ADDR="", SLURM_NNODES="2")
    (code,), (err,) = refused(process)
    assert code == 2
    assert "  NNODES: " in err
    assert "  MASTER_ADDR: " in err


@pytest.mark.parametrize(
    ("address", "code", "message"),
    [
        ("no-such-host.invalid", 2, "which mnode1 cannot resolve"),
        ("mnode1", 2, "which is 127.0.1.1 here, and NNODES is 2: each node would find itself"),
        ("192.0.2.9", 2, "has no route to MASTER_ADDR (192.0.2.9)"),
        ("10.203.7.77", 1, f"could not reach node 0 at 10.203.7.77:{PORT}"),
    ],
)
def test_a_wrong_address_is_told_where_it_is_wrong(two_nodes, address, code, message):
    arguments = [*two_nodes.arguments("wrong"), SOON]
    process = start(two_nodes, 1, arguments, MASTER_ADDR=address, SLURM_NNODES="2")
    codes, (err,) = refused(process)
    assert codes == [code]
    assert message in err


def test_node_0_knows_that_the_address_is_another_nodes(two_nodes):
    arguments = [*two_nodes.arguments("wrong"), SOON]
    process = start(two_nodes, 0, arguments, MASTER_ADDR=two_nodes.nodes[1].address)
    codes, (err,) = refused(process)
    assert codes == [2]
    assert "NODE_RANK is 0 on mnode0, and MASTER_ADDR (10.203.7.2) is not an address of" in err


def test_a_node_that_does_not_come_is_named(two_nodes):
    process = start(two_nodes, 0, [*two_nodes.arguments("missing"), SOON])
    codes, (err,) = refused(process)
    assert codes == [1]
    assert "1 of 2 nodes did not come within 5 s" in err
    assert "with NODE_RANK 1; there were node 0 (mnode0, 10.203.7.1)" in err


def test_a_node_with_another_config_is_named_on_both(two_nodes):
    arguments = two_nodes.arguments("differing")
    nodes = [start(two_nodes, n, [*arguments, f"actor.optim.lr=0.00{n + 1}"]) for n in (0, 1)]
    codes, messages = refused(*nodes)
    assert codes == [2, 2]
    for err in messages:
        assert "actor.optim.lr: node 1 (mnode1, 10.203.7.2) has 0.002; node 0 (mnode0, " in err
    assert not (two_nodes.root / "differing").exists()


def test_a_config_that_is_wrong_on_one_node_ends_both(two_nodes):
    arguments = two_nodes.arguments("wrong")
    nodes = [
        start(two_nodes, 0, arguments), start(two_nodes, 1, [*arguments, "actor.optim.lr=-1"]),
    ]  # fmt: skip
    codes, messages = refused(*nodes)
    assert codes == [2, 2]
    for err in messages:
        assert "node 1 (mnode1, 10.203.7.2): actor.optim.lr is -1" in err


def test_a_port_in_use_is_told_on_both(two_nodes):
    listen = (
        f"import socket, time; s = socket.create_server(('', {PORT})); print(flush=True); "
        "time.sleep(600)"
    )
    stranger = start(two_nodes, 0, ["-c", listen], command=[sys.executable])
    stranger.stdout.readline()
    try:
        nodes = [start(two_nodes, n, [*two_nodes.arguments("busy"), SOON]) for n in (0, 1)]
        codes, messages = refused(*nodes)
    finally:
        stranger.kill()
        stranger.communicate()
    assert codes == [2, 2]
    assert f"MASTER_PORT {PORT} is in use on node 0 (mnode0, 10.203.7.1)" in messages[0]
    assert f"what listens on 10.203.7.1:{PORT} is not node 0 of this run" in messages[1]


def test_plain_torchrun_too_names_the_node_that_differs(two_nodes):
    """Without launch/node.sh the ranks find out themselves, before a model is read."""
    nodes = [
        start(
            two_nodes, n,
            [
                "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=plain",
                f"--rdzv-conf=is_host={'false' if n else 'true'}",
                f"--rdzv-endpoint={two_nodes.nodes[0].address}:{PORT}",
                f"--local-addr={two_nodes.nodes[n].address}", *two_nodes.arguments("plain"),
                f"trainer.seed={n}",
            ],
            command=[sys.executable, "-m", "megappo.launch"], TORCH_CPP_LOG_LEVEL="ERROR",
        )
        for n in (0, 1)
    ]  # fmt: skip
    codes, messages = refused(*nodes)
    assert codes[0] == 2
    # The store goes with node 0, and torchrun on the other may miss it before its ranks' code.
    assert codes[1] in (1, 2)
    for err in messages:
        assert "error: the nodes are not alike" in err
        assert "trainer.seed: node 1 (mnode1, 10.203.7.2) has 1; node 0 (mnode0, " in err
