"""Worker processes with limits on time, memory, processes and replies, shared by threads.

Threads cannot be killed, and a signal handler neither runs off the main thread nor interrupts an
operation on large integers, so a limit has to be a kill from outside. Each `worker` kills its own
child that is over a limit and has another at once; here are the trainer's end of it and the
replacement of workers that are lost altogether. Not handled: a caller that forks after the first
request would share the pipes with its child; start processes by spawning.
"""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.errors import UserError

START_TIMEOUT_S = 120.0
"""A start takes about a second; the limit is for a machine that is very busy."""
EXIT_TIMEOUT_S = 5.0
"""A worker that is told to end gets this long before it is killed."""
STUCK_MARGIN_S = 15.0
"""A worker that is silent this long past the time limit is taken for lost, and killed."""

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class OverLimitError(RuntimeError):
    """A request took more time or memory than there is, or more processes or words."""


class EndedError(RuntimeError):
    """What worked on a request ended by itself or by the kernel's hand, or wrote over its reply."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one request."""

    timeout_s: float
    """Wall clock; start-up and queueing do not count."""
    memory_bytes: int = 2 * 1024**3
    """Address space of each process."""
    max_processes: int = 1
    """Alive for one request, those that earlier ones have left included."""
    max_reply_bytes: int = 1024**2
    max_folder_bytes: int | None = None
    """In the folder of a request, beyond the request itself; None: not looked at."""
    max_folder_entries: int = 1000


class WorkerPool:
    """Processes that answer requests of one kind; safe to use from threads.

    They start on first use and end with this object or the interpreter, whichever is first.
    """

    def __init__(
        self,
        task: str,
        *,
        limits: Limits,
        num_workers: int = 2,
        settings: Mapping[str, Any] | None = None,
        environment: Container[str] | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            task: Module with the `worker.Task`.
            limits: Of each request.
            num_workers: Requests at once; threads beyond that queue. A second process starts only
                when the first is busy.
            settings: For the task, JSON.
            environment: Variables of this process that they get; None: all.
        """
        assert limits.timeout_s > 0, limits
        assert num_workers >= 1, num_workers
        self.limits = limits
        self._task = task
        self._environment = environment
        self._settings = {
            **(settings or {}),
            "memory_bytes": limits.memory_bytes,
            "max_processes": limits.max_processes,
            "max_reply_bytes": limits.max_reply_bytes,
            "max_folder_bytes": limits.max_folder_bytes,
            "max_folder_entries": limits.max_folder_entries,
        }
        # Last in, first out: a process that runs is taken before one that has yet to start.
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._idle.put(None)

    def ask(self, request: Mapping[str, Any], *, margin_s: float = 0.0) -> dict[str, Any]:
        """The task's reply.

        Args:
            request: JSON.
            margin_s: Beyond the limit of time, for a task that keeps that limit itself.

        Raises:
            OverLimitError: If the request was over a limit.
            UserError: If the task refuses its settings.
            RuntimeError: If the process could not start, ended by itself or reported an error.
        """
        worker = self._idle.get()
        try:
            if worker is None or not worker.alive:
                worker = _Worker(self._task, self._settings, self._environment)
            return worker.ask(request, limits=self.limits, margin_s=margin_s)
        finally:
            # Also on errors, or the pool would shrink for ever. None stands for one to be started.
            self._idle.put(worker if worker is not None and worker.alive else None)

    def start(self) -> dict[str, Any]:
        """Starts one process, so that settings that it refuses are found now; what it says.

        Raises:
            UserError: If the task refuses its settings.
            RuntimeError: If the process could not start.
        """
        worker = self._idle.get()
        try:
            if worker is None or not worker.alive:
                worker = _Worker(self._task, self._settings, self._environment)
            return worker.await_ready()
        finally:
            self._idle.put(worker if worker is not None and worker.alive else None)

    def close(self) -> None:
        """Ends the idle processes; a later request starts new ones."""
        places = [self._idle.get() for _ in range(self._idle.qsize())]
        for worker in places:
            if worker is not None:
                worker.kill()
            self._idle.put(None)


class _Worker:
    """One running `worker`. After a failure of the pipes it is killed and not used again."""

    def __init__(
        self, task: str, settings: Mapping[str, Any], environment: Container[str] | None
    ) -> None:
        self._name = task.rpartition(".")[2]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megappo.rewards.worker", task],
            # `-m` looks in the working directory first: the package need not be installed.
            cwd=_PACKAGE_ROOT,
            env={
                name: value
                for name, value in os.environ.items()
                if environment is None or name in environment
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._settings = settings
        self._ready = False
        self._facts: dict[str, Any] = {}
        self._received = b""
        self._finalizer = weakref.finalize(self, _end, self._process)

    @property
    def alive(self) -> bool:
        return self._finalizer.alive and self._process.poll() is None

    def await_ready(self) -> dict[str, Any]:
        if self._ready:
            return self._facts
        try:
            self._send(self._settings)
            reply = self._receive(timeout_s=START_TIMEOUT_S)
            if "refused" in reply:
                raise UserError(str(reply["refused"]))
            if "ready" not in reply:
                raise RuntimeError(f"{self._name} did not start: {_in_words(reply)}")
        except BaseException:
            self.kill()
            raise
        self._ready, self._facts = True, reply["ready"]
        return self._facts

    def ask(self, request: Mapping[str, Any], *, limits: Limits, margin_s: float) -> dict[str, Any]:
        self.await_ready()
        timeout_s = limits.timeout_s + margin_s
        try:
            self._send({**request, "timeout_s": timeout_s})
            reply = self._receive(timeout_s=timeout_s + STUCK_MARGIN_S)
        except BaseException:
            # What is left in the pipes would be taken for the next reply.
            self.kill()
            raise
        over = {
            "timeout": f"took over {limits.timeout_s} s",
            "out_of_memory": f"took over {limits.memory_bytes / 2**20:.0f} MiB of memory",
            "too_many": f"had over {limits.max_processes} process(es)",
            "unwaited": f"left {reply.get('unwaited')} ended processes that it never waited for",
            "too_full": f"filled its folder (over {limits.max_folder_bytes} bytes, or "
            f"{limits.max_folder_entries} files and folders)",
            "too_long": f"said over {limits.max_reply_bytes} bytes",
        }
        for word, text in over.items():
            if word in reply:
                raise OverLimitError(text)
        if "ended" in reply or "garbled" in reply:
            raise EndedError(_in_words(reply))
        if "error" in reply or "refused" in reply:
            raise RuntimeError(_in_words(reply))
        return reply

    def kill(self) -> None:
        """Ends the process and reaps it; harmless when repeated."""
        self._finalizer()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        line = json.dumps(message, default=str).encode() + b"\n"
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
                raise RuntimeError(f"{self._name} said nothing for {timeout_s} s")
            part = os.read(self._process.stdout.fileno(), 65536)
            if not part:
                raise RuntimeError(self._obituary())
            self._received += part
        line, self._received = self._received.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def _obituary(self) -> str:
        return (
            f"{self._name} ended by itself with status {self._process.wait()} "
            f"{'at work' if self._ready else 'while starting'}; "
            "its messages are on the standard error of this process"
        )


def _in_words(reply: Mapping[str, Any]) -> str:
    if "error" in reply:
        return str(reply["error"])
    if "ended" in reply:
        return f"its process ended with status {reply['ended']}"
    if "garbled" in reply:
        return f"it wrote over the reply: {reply['garbled']}"
    return str(dict(reply))


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
    # Now that stdin is closed a worker kills what is below it and ends. One that is stuck does
    # not, and then the kernel kills its child with it.
    try:
        process.wait(timeout=EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
