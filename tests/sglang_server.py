"""A real `python -m sglang.launch_server` on CPU, started as README.md says."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

KEY = "a-key-of-this-test"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _die_with_the_test() -> None:
    """In the child: a test that is killed leaves no server behind."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class LaunchedServer:
    """One server at a fixed port: started, killed and started again as a test wants it."""

    def __init__(self, model: Path, log_file: Path, *, context_length: int) -> None:
        self.model, self.log_file, self.context_length = model, log_file, context_length
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it; it takes a while to be healthy."""
        command = [
            sys.executable, "-m", "sglang.launch_server",
            "--model-path", str(self.model), "--host", "127.0.0.1", "--port", str(self.port),
            "--api-key", KEY, "--device", "cpu", "--dtype", "float32",
            "--attention-backend", "torch_native", "--context-length", str(self.context_length),
            "--max-total-tokens", "16384", "--max-running-requests", "32",
            "--schedule-policy", "fcfs", "--disable-overlap-schedule", "--disable-radix-cache",
            "--sleep-on-idle", "--skip-server-warmup",
        ]  # fmt: skip
        environment = {
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        }
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=os.environ | environment, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=_die_with_the_test,
            )  # fmt: skip

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to all of its processes."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        if self._process is not None:
            self.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


def _free_port() -> int:
    """Below those that the kernel hands out: a connection may have such a one before the server.

    Also below Slurm's of the tests, and those of engines.
    """
    for port in random.sample(range(10_000, 16_000), 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:  # somebody has it
                continue
    raise AssertionError("none of 1000 ports from 10000 to 15999 is free")
