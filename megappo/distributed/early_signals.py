"""A signal before there are ranks ends a launcher as resumable: nothing is lost, and it can go on.

torchrun takes signals over when it starts ranks. Until then (the meeting of nodes, the import of
torch, the rendezvous) they would end the launcher by their default, and Slurm would count the job
as failed and not requeue it. Left out: the fraction of a second in which Python itself starts.

Python runs its handlers between two steps of the main thread, which may be in one long call of
torch: up to a minute where node 0 does not answer. So a thread is woken by the interpreter's own
handler in C, and ends the process.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from megappo.errors import EXIT_RESUMABLE


@contextmanager
def resumable_before_ranks(names: Sequence[str]) -> Iterator[None]:
    """Ends the process with 75 on these signals, for as long as nobody else handles them.

    Signals that are ignored stay so, as under nohup. For the main thread.

    Args:
        names: of signals, such as SIGTERM.
    """
    numbers = [signal.Signals[name] for name in names]
    found = {number: signal.getsignal(number) for number in numbers}
    before = {n: handler for n, handler in found.items() if handler not in (signal.SIG_IGN, None)}
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    woken = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in before:
        signal.signal(number, _leave_to_thread)
    thread = threading.Thread(target=_watch, args=[read_end], daemon=True)
    thread.start()
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is _leave_to_thread:
                signal.signal(number, handler)
        signal.set_wakeup_fd(woken)
        os.close(write_end)
        thread.join()
        os.close(read_end)


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    """Nothing: `_watch` has seen the signal."""


def _watch(read_end: int) -> None:
    """Reads the numbers of signals that came, until the other end is closed."""
    while number := os.read(read_end, 1):
        if signal.getsignal(number[0]) is _leave_to_thread:  # else torchrun has its ranks
            name = signal.Signals(number[0]).name
            text = f"stopped by {name} before the ranks started; start the same command to go on\n"
            os.write(2, text.encode())
            os._exit(EXIT_RESUMABLE)
