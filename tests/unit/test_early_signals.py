"""A signal that meets a launcher before it has ranks: 75, whatever the launcher is doing."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from megappo.distributed.early_signals import resumable_before_ranks
from megappo.distributed.node_network import own_addresses


def start(*command, **environment):
    return subprocess.Popen(
        [sys.executable, *command], env=os.environ | environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def end(process, sent):
    """Sends a signal; returns the exit code and stderr."""
    process.send_signal(sent)
    try:
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, err


def free_port(address):
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGUSR1])
def test_a_node_that_waits_for_the_others_ends_as_resumable(sent):
    address = next((a for a in own_addresses() if ":" not in a), None)
    if address is None:
        pytest.skip("needs an IPv4 address that is not loopback: nodes do not meet there")
    port = free_port(address)
    process = start(
        "-m", "megappo.node", "none.yaml", NNODES="2", NODE_RANK="0", MASTER_ADDR=address,
        MASTER_PORT=str(port), GPUS_PER_NODE="1", SLURM_STEP_NUM_NODES="2",
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while True:
        try:
            socket.create_connection((address, port), timeout=10).close()
            break
        except ConnectionRefusedError:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
    code, err = end(process, sent)
    assert code == 75, err
    assert err == (
        f"stopped by {sent.name} before the ranks started; start the same command to go on\n"
    )


def test_a_launcher_in_a_call_of_torchs_ends_as_resumable_too():
    """It waits for an answer to the first bytes that it sends to the rendezvous' store."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(120)
        process = start(
            "-m", "megappo.launch", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{listener.getsockname()[1]}", "--rdzv-id=x",
            "--rdzv-conf=is_host=false", "none.yaml",
        )  # fmt: skip
        connection, _ = listener.accept()
        with connection:
            code, err = end(process, signal.SIGTERM)
    assert code == 75, err
    assert "stopped by SIGTERM before the ranks started" in err


WITH_RANKS = """
import signal, sys, time
from megappo.distributed.early_signals import resumable_before_ranks
with resumable_before_ranks(["SIGTERM"]):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    print(flush=True)
    time.sleep(120)
"""


def test_a_signal_that_another_handles_is_left_to_it():
    process = start("-c", WITH_RANKS)
    process.stdout.readline()
    assert end(process, signal.SIGTERM) == (7, "")


def test_ignored_signals_stay_so_and_all_is_as_before_at_the_end():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    others = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    try:
        with resumable_before_ranks(["SIGTERM", "SIGINT", "SIGHUP"]):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) not in others
    finally:
        signal.signal(signal.SIGHUP, before)
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == others
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    assert fd == -1
