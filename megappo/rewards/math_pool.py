"""Processes that compare mathematical expressions, each killed when a comparison takes too long.

Threads cannot be killed, and a signal handler neither runs off the main thread nor interrupts an
operation on large integers, so the time limit has to be a kill from outside. Two processes take
turns: while one works, the replacement of a killed one starts up, so that a row of hopeless
expressions costs the time limit each and not a start-up on top. Not handled: a caller that forks
after the first comparison would share the pipes with its child; start processes by spawning.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from megappo.rewards.base import RewardTimeoutError

START_TIMEOUT_S = 120.0
"""A start takes about a second; the limit is for a machine that is very busy."""

_log = logging.getLogger(__name__)
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class MathVerifier:
    """Says whether two expressions are equal, within a wall-clock limit; safe to use from threads.

    Processes start on first use and end with this object or the interpreter, whichever is first.
    """

    def __init__(self, *, timeout_s: float, num_workers: int = 2) -> None:
        """Starts nothing yet.

        Args:
            timeout_s: Wall-clock limit of one comparison; start-up and queueing do not count.
            num_workers: Comparisons at once. At least 2 hide the start-up after a kill.
        """
        assert timeout_s > 0, timeout_s
        assert num_workers >= 1, num_workers
        self.timeout_s = timeout_s
        self.num_timeouts = 0
        self._lock = threading.Lock()
        self._idle: queue.Queue[_Worker | None] = queue.Queue()
        for _ in range(num_workers):
            self._idle.put(None)

    def equal(self, answer: str, wanted: str) -> bool:
        """Whether math-verify holds `answer` equal to `wanted`.

        Raises:
            RewardTimeoutError: If the comparison ran out of time or memory.
            RuntimeError: If the process could not start, ended by itself or reported an error.
        """
        worker = self._idle.get()
        try:
            if worker is None or not worker.alive:
                worker = _Worker()
            return worker.equal(answer, wanted, timeout_s=self.timeout_s)
        except RewardTimeoutError:
            self._count_timeout(answer)
            raise
        finally:
            self._give_back(worker)

    def close(self) -> None:
        """Ends the idle processes; a later comparison starts new ones."""
        for _ in range(self._idle.qsize()):
            worker = self._idle.get()
            if worker is not None:
                worker.kill()
            self._idle.put(None)

    def _give_back(self, worker: _Worker | None) -> None:
        replacement = None
        try:
            replacement = worker if worker is not None and worker.alive else _Worker()
        finally:
            # Even if no process can be started: a lost place would shrink the pool for ever.
            self._idle.put(replacement)

    def _count_timeout(self, answer: str) -> None:
        with self._lock:
            self.num_timeouts += 1
            first = self.num_timeouts == 1
        if first:
            _log.warning(
                "gave up comparing the answer %.80r: over %s s or out of memory; it scores 0, and "
                "further ones are only counted",
                answer,
                self.timeout_s,
            )


class _Worker:
    """One running `math_worker`. After any failure it is killed and not used again."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megappo.rewards.math_worker"],
            # `-m` looks in the working directory first: the package need not be installed.
            cwd=_PACKAGE_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._ready = False
        self._received = b""
        self._finalizer = weakref.finalize(self, _end, self._process)

    @property
    def alive(self) -> bool:
        return self._finalizer.alive and self._process.poll() is None

    def equal(self, answer: str, wanted: str, *, timeout_s: float) -> bool:
        try:
            self._wait_until_ready()
            reply = self._ask({"answer": answer, "wanted": wanted, "timeout_s": timeout_s})
        except BaseException:
            # What is left in the pipes would be taken for the next reply.
            self.kill()
            raise
        if reply.get("out_of_memory"):
            self.kill()
            raise RewardTimeoutError(f"comparing {answer!r:.200} ran out of memory")
        if "error" in reply:
            raise RuntimeError(f"math-verify failed on {answer!r:.200}: {reply['error']}")
        return bool(reply["equal"])

    def kill(self) -> None:
        """Ends the process and reaps it; harmless when repeated."""
        self._finalizer()

    def _wait_until_ready(self) -> None:
        if self._ready:
            return
        try:
            self._receive(timeout_s=START_TIMEOUT_S)
        except RewardTimeoutError as error:
            raise RuntimeError(f"math_worker was not ready after {START_TIMEOUT_S} s") from error
        self._ready = True

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        line = json.dumps(request).encode() + b"\n"
        try:
            while line:
                line = line[self._process.stdin.write(line) :]
        except BrokenPipeError as error:
            raise RuntimeError(self._obituary()) from error
        return self._receive(timeout_s=request["timeout_s"])

    def _receive(self, *, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        # poll, not select: a training process may hold more than 1024 descriptors.
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN | select.POLLHUP)
        while b"\n" not in self._received:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                raise RewardTimeoutError(f"no reply within {timeout_s} s")
            part = os.read(self._process.stdout.fileno(), 65536)
            if not part:
                raise self._ended()
            self._received += part
        line, self._received = self._received.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def _ended(self) -> RuntimeError:
        if self._process.wait() == -signal.SIGALRM:
            return RewardTimeoutError("the comparison was ended by its own alarm")
        return RuntimeError(self._obituary())

    def _obituary(self) -> str:
        return (
            f"math_worker ended by itself with status {self._process.wait()} "
            f"{'while comparing' if self._ready else 'while starting'}; "
            "its messages are on the standard error of this process"
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
