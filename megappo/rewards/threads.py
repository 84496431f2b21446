"""Threads that run rewards and hold up nothing: neither the end of a run nor that of a process.

The standard library's pool works off its whole queue before an interpreter ends. Here calls that
have not begun are dropped by `close`, and those at work run in daemon threads; worker processes
that they wait for are ended by their pools.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class _Call:
    future: Future[Any]
    work: Callable[[], Any]


class RewardThreads:
    """A fixed number of threads; they end after `close`, or once this object is gone."""

    def __init__(self, count: int) -> None:
        """Starts them."""
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._finalizer = weakref.finalize(self, _stop, self._calls, count)
        for number in range(count):
            threading.Thread(
                target=_serve, args=(self._calls,), name=f"reward_{number}", daemon=True
            ).start()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Runs in the next free thread; cancelled if that is not before `close`."""
        future: Future[Any] = Future()
        if self._finalizer.alive:
            self._calls.put(_Call(future=future, work=work))
        else:
            future.cancel()
        return future

    def close(self) -> None:
        """Drops calls that have not begun, and waits for none; harmless when repeated."""
        self._finalizer()


def _stop(calls: queue.SimpleQueue[_Call | None], count: int) -> None:
    while True:
        try:
            call = calls.get_nowait()
        except queue.Empty:
            break
        if call is not None:
            call.future.cancel()
    for _ in range(count):
        calls.put(None)


def _serve(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        if call.future.set_running_or_notify_cancel():
            try:
                found = call.work()
            except BaseException as error:  # for whoever waits, a stop from the keyboard too
                call.future.set_exception(error)
            else:
                call.future.set_result(found)
                del found
        del call  # or an idle thread would keep a reward, and its processes, alive
