"""Runs a worker script on N real gloo ranks and shows what they printed when one of them fails."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORKERS = Path(__file__).parent / "workers"
ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """A TCP port that nobody listens on.

    Above those of engines, and below those that the kernel hands out, one of which a connection
    could have before it is used.
    """
    # Not the generator that ranks give the same seed.
    for port in random.SystemRandom().sample(range(22_000, 32_000), 1000):
        with socket.socket() as s:
            try:
                s.bind(("", port))
                return port
            except OSError:  # somebody has it
                continue
    raise AssertionError("none of 1000 ports from 22000 to 31999 is free")


def run_ranks(worker: str, num_ranks: int, *args: str, timeout_s: float = 400.0) -> list[str]:
    """Starts `workers/<worker>` once a rank, with the variables that torchrun sets.

    Returns what each rank printed. The first failure, or the time limit, ends all ranks and
    raises an AssertionError with the output of every one.
    """
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # a rank that crashes says where
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(num_ranks)]
        processes = []
        for rank, log in enumerate(logs):
            command = [sys.executable, str(WORKERS / worker), *args]
            rank_environment = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("w") as stream:
                processes.append(
                    subprocess.Popen(
                        command, env=rank_environment, stdout=stream, stderr=subprocess.STDOUT
                    )
                )
        failure = _wait(processes, timeout_s)
        outputs = [log.read_text() for log in logs]
    if failure:
        shown = "\n".join(f"--- rank {r}\n{text}" for r, text in enumerate(outputs))
        raise AssertionError(f"{worker} {' '.join(args)}: {failure}\n{shown}")
    return outputs


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> str | None:
    """Waits for all ranks; the reason why they were ended early, or None."""
    deadline = time.monotonic() + timeout_s
    failure = None
    try:
        while failure is None and any(p.poll() is None for p in processes):
            failure = _first_failure(processes)
            if time.monotonic() > deadline:
                failure = f"not done after {timeout_s} s"
            time.sleep(0.02)
        return failure or _first_failure(processes)
    finally:
        for p in processes:
            if p.poll() is None:
                p.kill()
                p.wait()


def _first_failure(processes: list[subprocess.Popen[bytes]]) -> str | None:
    for rank, p in enumerate(processes):
        if p.poll() not in (None, 0):
            return f"rank {rank} exited with {p.returncode}"
    return None
