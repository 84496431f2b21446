r"""The process that compares two expressions within a time limit; `math_pool` starts and feeds it.

One JSON object a line. In: `{"answer": str, "wanted": str, "timeout_s": float}`. Out: once
`{"ready": true}`, then for each request one of `{"equal": bool}`, `{"timeout": true}`,
`{"out_of_memory": true}`, `{"ended": status}` and `{"error": text}`. It ends when stdin closes.

The process itself only supervises. It imports math-verify (no torch: about a second and 60 MB) and
forks a child that compares; a child over its time is killed, and the next fork starts with
everything imported, in milliseconds. Forking is safe here because the process has one thread.

The limits are also for the case that nobody is left to kill: SIGALRM keeps its default action, so
the kernel ends a comparison even when supervisor and trainer were killed. A Python handler would
have to wait for a turn of the interpreter, which a power of two large integers does not give.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import signal
import sys
import time
from typing import Any, NoReturn, TextIO

MEMORY_LIMIT_BYTES = 2 * 1024**3
ORPHAN_MARGIN_S = 1.0
"""The supervisor kills first; the kernel's alarm comes this much later."""


def main() -> None:
    """Serves requests until stdin closes."""
    _limit_resources()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Whatever a library prints must not end up between the replies.
    os.dup2(2, 1)
    # math-verify logs every expression it cannot read; that is a usual event with model output.
    logging.disable(logging.CRITICAL)
    # First use compiles regular expressions and grammar tables: not on a request's time.
    _compare(answer=r"\frac{1}{2}x+\sqrt{2}", wanted=r"\{1, 2\}")
    _send(replies, {"ready": True})
    child = _Child(replies)
    for line in sys.stdin:
        if not child.running():
            child = _Child(replies)
        reply = child.ask(line.encode(), timeout_s=json.loads(line)["timeout_s"])
        if not reply.keys() & {"equal", "error"}:
            # Stuck, dead or bloated; replaced before the reply, so that the next request finds it.
            child.end()
            child = _Child(replies)
        _send(replies, reply)
    child.end()


def _limit_resources() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Ctrl-C reaches the whole process group; the trainer decides, and closes stdin when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Child:
    """A fork that compares, seen from the supervisor."""

    def __init__(self, supervisor_replies: TextIO) -> None:
        requests, self._to_child = os.pipe()
        self._from_child, replies = os.pipe()
        self._status: int | None = None
        self._pid = os.fork()
        if self._pid == 0:
            # With its own copy of the writing end it would never see the pipe close.
            os.close(self._to_child)
            os.close(self._from_child)
            supervisor_replies.close()
            _compare_until_closed(requests, replies)
        os.close(requests)
        os.close(replies)

    def running(self) -> bool:
        return self._wait(os.WNOHANG) is None

    def ask(self, line: bytes, *, timeout_s: float) -> dict[str, Any]:
        """The child's reply, or what became of the child."""
        while line:
            line = line[os.write(self._to_child, line) :]
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._from_child, select.POLLIN)
        received = b""
        while not received.endswith(b"\n"):
            left_s = max(deadline - time.monotonic(), 0.0)
            if not poll.poll(left_s * 1000):
                return {"timeout": True}
            part = os.read(self._from_child, 65536)
            if not part:
                status = self._wait(0)
                return {"timeout": True} if status == -signal.SIGALRM else {"ended": status}
            received += part
        reply: dict[str, Any] = json.loads(received)
        return reply

    def end(self) -> None:
        """Kills the child if need be, and reaps it."""
        if self.running():
            os.kill(self._pid, signal.SIGKILL)
            self._wait(0)
        os.close(self._to_child)
        os.close(self._from_child)

    def _wait(self, options: int) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self._pid, options)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status


def _compare_until_closed(requests: int, replies: int) -> NoReturn:
    exit_code = 1
    try:
        with os.fdopen(requests) as lines, os.fdopen(replies, "w") as out:
            for line in lines:
                request = json.loads(line)
                signal.setitimer(signal.ITIMER_REAL, request["timeout_s"] + ORPHAN_MARGIN_S)
                reply = _answer(request["answer"], request["wanted"])
                signal.setitimer(signal.ITIMER_REAL, 0)
                _send(out, reply)
        exit_code = 0
    finally:
        # Never back into the supervisor's loop, whatever happens.
        os._exit(exit_code)


def _answer(answer: str, wanted: str) -> dict[str, Any]:
    try:
        return {"equal": _compare(answer=answer, wanted=wanted)}
    except MemoryError:
        return {"out_of_memory": True}
    except Exception as error:  # reported to the trainer, which raises it there
        return {"error": f"{type(error).__name__}: {error}"[:2000]}


def _compare(*, answer: str, wanted: str) -> bool:
    from math_verify import parse, verify

    # Its own time limits are off: they rely on a Python signal handler, see the top of this file.
    gold = parse(f"\\boxed{{{wanted}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify finds no expression in the ground truth {wanted!r}")
    return bool(
        verify(gold, parse(f"\\boxed{{{answer}}}", parsing_timeout=None), timeout_seconds=None)
    )


def _send(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
