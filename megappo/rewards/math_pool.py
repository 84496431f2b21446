"""Processes that compare mathematical expressions within a wall-clock limit, shared by threads.

Threads cannot be killed, and a signal handler neither runs off the main thread nor interrupts an
operation on large integers, so the time limit has to be a kill from outside. Each `math_worker`
kills its own child that is over time and has another at once; here are the trainer's end of it and
the replacement of workers that are lost altogether. Not handled: a caller that forks after the
first comparison would share the pipes with its child; start processes by spawning.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import select
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
EXIT_TIMEOUT_S = 2.0
"""A worker that is told to end gets this long before it is killed."""
STUCK_MARGIN_S = 10.0
"""A worker that is silent this long past the time limit is taken for lost, and killed."""

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
            num_workers: Comparisons at once; threads beyond that queue. The second process starts
                only when the first is busy.
        """
        assert timeout_s > 0, timeout_s
        assert num_workers >= 1, num_workers
        self.timeout_s = timeout_s
        self.num_timeouts = 0
        self._lock = threading.Lock()
        # Last in, first out: a process that runs is taken before one that has yet to start.
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
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
            # Also on errors, or the pool would shrink for ever. None stands for one to be started.
            self._idle.put(worker if worker is not None and worker.alive else None)

    def close(self) -> None:
        """Ends the idle processes; a later comparison starts new ones."""
        places = [self._idle.get() for _ in range(self._idle.qsize())]
        for worker in places:
            if worker is not None:
                worker.kill()
            self._idle.put(None)

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
    """One running `math_worker`. After a failure of the pipes it is killed and not used again."""

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
            if not self._ready:
                self._receive(timeout_s=START_TIMEOUT_S)
                self._ready = True
            self._send({"answer": answer, "wanted": wanted, "timeout_s": timeout_s})
            reply = self._receive(timeout_s=timeout_s + STUCK_MARGIN_S)
        except BaseException:
            # What is left in the pipes would be taken for the next reply.
            self.kill()
            raise
        if "equal" in reply:
            return bool(reply["equal"])
        if "timeout" in reply:
            raise RewardTimeoutError(f"comparing {answer:.200} took over {timeout_s} s")
        if "out_of_memory" in reply:
            raise RewardTimeoutError(f"comparing {answer:.200} ran out of memory")
        raise RuntimeError(f"math-verify failed on {answer:.200}: {reply}")

    def kill(self) -> None:
        """Ends the process and reaps it; harmless when repeated."""
        self._finalizer()

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        line = json.dumps(request).encode() + b"\n"
        try:
            while line:
                line = line[self._process.stdin.write(line) :]
        except BrokenPipeError as error:
            raise RuntimeError(self._obituary()) from error

    def _receive(self, *, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        # poll, not select: a training process may hold more than 1024 descriptors.
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        while b"\n" not in self._received:
            left_s = max(deadline - time.monotonic(), 0.0)
            if not poll.poll(left_s * 1000):
                raise RuntimeError(f"math_worker said nothing for {timeout_s} s")
            part = os.read(self._process.stdout.fileno(), 65536)
            if not part:
                raise RuntimeError(self._obituary())
            self._received += part
        line, self._received = self._received.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def _obituary(self) -> str:
        return (
            f"math_worker ended by itself with status {self._process.wait()} "
            f"{'while comparing' if self._ready else 'while starting'}; "
            "its messages are on the standard error of this process"
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
    # A worker that waits for a request ends its child and itself now that stdin is closed; one that
    # is stuck does neither, and the child's alarm takes care of the child.
    try:
        process.wait(timeout=EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
