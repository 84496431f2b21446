"""The process in which rewards that may hang, crash or bloat run; `worker_pool` feeds it.

One JSON object a line. In: once the settings, then requests, each with `timeout_s`. Out: once
`{"ready": facts}` or `{"refused": text}`, then for each request the task's own reply, or one of
`{"timeout": true}`, `{"out_of_memory": true}`, `{"too_long": bytes}`, `{"too_many": processes}`,
`{"unwaited": processes}`, `{"too_full": true}`, `{"ended": status}`, `{"garbled": text}` and
`{"error": text}`. It ends when stdin closes.

The process itself only supervises. What a task does happens in a fork, of which it takes four
things from outside: time (a child over its time is killed, and the next fork starts with everything
imported, in milliseconds), the number of processes below it, what its folder holds, and the length
of a reply. Memory is the kernel's limit on address space. Forking is safe here because this process
has one thread.

A child dies with the supervisor, by the kernel's hand. Processes that a child leaves behind become
the supervisor's, which kills them when that child or itself ends; a child that answers requests one
after the other may keep some between them, such as a pool, and they count in the next request.
Those that have ended do not, up to a limit on those that it never waits for. Not covered: a
supervisor that is killed (SIGKILL) while its child has children of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

from megappo.rewards.confine import adopt_orphans, die_with_parent
from megappo.rewards.folder import is_over, remove_tree

Message = dict[str, Any]

START_TIMEOUT_S = 100.0
"""For a child to be ready; less than the pool waits for the supervisor."""
LOOK_S = 0.1
"""How often the processes below a child at work are counted, and what is in its folder."""
MOST_ENDED = 100
"""Processes below a child that have ended, and that it has not waited for."""
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a kind of worker does; a module names it `TASK`."""

    answer: Callable[[Message], Message]
    """In the child: a request's reply; with `"spent": true` the next one gets another child."""
    prepare: Callable[[], None] = lambda: None
    """In the supervisor, once: imports that forks then share. No code of users or models."""
    start: Callable[[Mapping[str, Any]], Message] = lambda settings: {}
    """In each child, with the settings: facts for the trainer; ValueError is a user's mistake."""
    one_request_a_child: bool = False
    """For requests that must not see what others left. Each runs in an empty folder of its own."""


def main(module: str) -> None:
    """Serves requests until stdin closes.

    Args:
        module: the one that has the task.
    """
    task: Task = importlib.import_module(module).TASK
    # A terminal or launcher signals the whole process group; the trainer decides what becomes of
    # the step, and closes stdin when it ends.
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)
    adopt_orphans()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Whatever anybody prints must not end up between the replies.
    os.dup2(2, 1)
    settings: Message = json.loads(sys.stdin.readline() or "{}")
    for limit, value in (
        (resource.RLIMIT_AS, settings["memory_bytes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    task.prepare()
    child = _Child(task, settings, replies)
    ready = child.receive(timeout_s=START_TIMEOUT_S)
    _send(replies, ready)
    if "ready" in ready:
        for line in sys.stdin:
            child = _serve(child, line, replies)
    child.end()


def _serve(child: _Child, line: str, replies: TextIO) -> _Child:
    """Sends one reply, and returns the child for the next request."""
    if not child.usable or not child.running():
        child = child.replaced()
        again = child.receive(timeout_s=START_TIMEOUT_S)
        if "ready" not in again:
            _send(replies, again)
            return child
    reply = child.ask(line.encode(), timeout_s=json.loads(line)["timeout_s"])
    if child.task.one_request_a_child or not child.usable or reply.get("spent"):
        child.end()
        child = child.replaced()
        # Ready before the reply, so that the next request finds it so.
        if "ready" not in child.receive(timeout_s=START_TIMEOUT_S):
            child.end()
    _send(replies, reply)
    return child


class _Child:
    """A fork that works, seen from the supervisor."""

    def __init__(self, task: Task, settings: Mapping[str, Any], replies: TextIO) -> None:
        self.task, self._settings, self._replies = task, settings, replies
        self.usable = True
        requests, self._to_child = os.pipe()
        self._from_child, answers = os.pipe()
        self._received = b""
        self._num_asked_bytes = 0
        self._status: int | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="megappo-reward-"))
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            # With its own copy of the writing end it would never see the pipe close.
            os.close(self._to_child)
            os.close(self._from_child)
            replies.close()
            _work(task, settings, requests, answers, parent=parent, folder=self._folder)
        os.close(requests)
        os.close(answers)

    def replaced(self) -> _Child:
        """Another one like it, after its end."""
        self.end()
        return _Child(self.task, self._settings, self._replies)

    def running(self) -> bool:
        """Whether it has not ended by itself."""
        return self._wait(os.WNOHANG) is None

    def ask(self, line: bytes, *, timeout_s: float) -> Message:
        """The child's reply, or what became of the child."""
        deadline = time.monotonic() + timeout_s
        self._num_asked_bytes = len(line)
        while line:
            try:
                line = line[os.write(self._to_child, line) :]
            except BrokenPipeError:
                break  # It is gone, which `receive` finds and tells.
        return self.receive(timeout_s=max(deadline - time.monotonic(), 0.0))

    def receive(self, *, timeout_s: float) -> Message:
        """The next line from the child; after anything else it is of no more use."""
        try:
            return self._receive(timeout_s)
        except _Lost as lost:
            self.usable = False
            return lost.reply

    def _receive(self, timeout_s: float) -> Message:
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._from_child, select.POLLIN)
        poll.register(0, 0)  # reports that the trainer is gone
        next_look = time.monotonic() + LOOK_S
        while not self._received.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise _Lost({"timeout": True})
            events = dict(poll.poll(min(left_s, LOOK_S) * 1000 + 1))
            if 0 in events:
                self.end()
                sys.exit(0)
            if self._from_child in events:
                self._take()
            elif not self.running():
                # Those that it left behind may hold the pipe open.
                raise _Lost({"ended": self._status})
            if time.monotonic() >= next_look:
                self._look()
                next_look = time.monotonic() + LOOK_S
        self._look()
        line, self._received = self._received, b""
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise _Lost({"garbled": repr(line[:200])})
        return reply

    def _look(self) -> None:
        self._reap()
        family = _descendants()
        num_ended = sum(family.values())
        if (number := len(family) - num_ended) > self._settings["max_processes"]:
            raise _Lost({"too_many": number})
        if num_ended > MOST_ENDED:
            raise _Lost({"unwaited": num_ended})
        max_bytes = self._settings["max_folder_bytes"]
        # What it was asked may lie there too.
        if max_bytes is not None and is_over(
            self._folder,
            max_bytes=max_bytes + self._num_asked_bytes,
            max_entries=self._settings["max_folder_entries"],
        ):
            raise _Lost({"too_full": True})

    def _take(self) -> None:
        part = os.read(self._from_child, 65536)
        if not part:
            status = self._wait(0)
            raise _Lost({"ended": status})
        self._received += part
        if len(self._received) > self._settings["max_reply_bytes"]:
            raise _Lost({"too_long": len(self._received)})

    def end(self) -> None:
        """Kills the child and all below it, reaps them, and removes its folder. Repeatable."""
        self.usable = False
        if self._to_child < 0:
            return
        while family := _descendants():
            for pid in family:
                _kill(pid)
            if not self._reap():
                time.sleep(0.001)
        os.close(self._to_child)
        os.close(self._from_child)
        self._to_child = -1
        try:
            remove_tree(self._folder)
        except (OSError, MemoryError) as error:
            # The reply matters more; standard error is the rank's log.
            print(f"{self._folder} is left: {error!r}", file=sys.stderr)  # noqa: T201

    def _reap(self) -> bool:
        """Takes in every process of the supervisor's own that has ended; whether one had."""
        found = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return found
            if pid == 0:
                return found
            found = True
            if pid == self._pid:
                self._status = os.waitstatus_to_exitcode(status)

    def _wait(self, options: int) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self._pid, options)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status


class _Lost(Exception):  # noqa: N818, what became of a child
    def __init__(self, reply: Message) -> None:
        self.reply = reply


def _descendants() -> dict[int, bool]:
    """Every process below this one: its id, and whether it has ended and nobody has reaped it."""
    children: dict[int, list[int]] = {}
    ended: set[int] = set()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                stat = Path("/proc", name, "stat").read_text()
            except OSError:
                continue  # It ended meanwhile.
            # The name in brackets may hold anything, brackets too.
            state, parent = stat.rpartition(")")[2].split()[:2]
            children.setdefault(int(parent), []).append(int(name))
            if state in "ZX":
                ended.add(int(name))
    found: list[int] = []
    new = [os.getpid()]
    while new:
        new = [child for pid in new for child in children.get(pid, [])]
        found += new
    return {pid: pid in ended for pid in found}


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # It ended by itself.


def _work(
    task: Task,
    settings: Mapping[str, Any],
    requests: int,
    answers: int,
    *,
    parent: int,
    folder: Path,
) -> NoReturn:
    """The child's life. Never back into the supervisor's loop, whatever happens."""
    exit_code = 1
    me = os.getpid()
    try:
        die_with_parent(parent)
        os.setsid()  # for the same reason; what the task starts stops at signals as usual
        for number in _STOPS:
            # Slurm's warning goes to every process of a job, whatever its session.
            if number != signal.SIGUSR1:
                signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        with os.fdopen(requests) as lines, os.fdopen(answers, "w", encoding="utf-8") as out:
            _send(out, _guarded(partial(_start, task, settings, folder)))
            for line in lines:
                reply = _guarded(partial(task.answer, json.loads(line)))
                if os.getpid() != me:
                    break  # The task forked, and this is the copy.
                _send(out, reply)
        exit_code = 0
    finally:
        os._exit(exit_code)


def _start(task: Task, settings: Mapping[str, Any], folder: Path) -> Message:
    if task.one_request_a_child:
        os.chdir(folder)
    try:
        return {"ready": task.start(settings)}
    except ValueError as error:
        return {"refused": str(error)}


def _guarded(work: Callable[[], Message]) -> Message:
    try:
        return work()
    except MemoryError:
        return {"out_of_memory": True}
    except Exception as error:  # reported to the trainer, which raises it there
        return {"error": f"{type(error).__name__}: {error}"[:2000]}


def _send(replies: TextIO, message: Message) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main(sys.argv[1])
