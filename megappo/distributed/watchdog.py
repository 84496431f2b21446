"""Notices a run that does not move, or a rank that failed, off the collectives of the training.

Each rank has a thread that says every few seconds, through a small store of its own on rank 0, in
which step and phase its main thread is and whether that has moved. Rank 0's thread judges. A run
hangs when a rank's thread is silent for `timeout_s` (the process is stopped, or its machine lost),
or when a rank's main thread does not move for so long, unless a rank that no other is behind is in
a phase that waits for engines, rewards or storage. Engines and rewards have limits of their own.
Storage has none: ranks that wait in a collective for one that reads or writes fail after
`trainer.distributed_timeout_s`, but a save whose writing thread hangs is waited for without end.
After a hang every rank that answers hands in its Python stacks and its last collective, rank 0
reports, and all ranks end.

A rank that fails says so in the store as well, and one that was killed is missed by the others of
its machine: ranks that wait for it in a collective, and would for half an hour, end after
`GRACE_S`.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import psutil
import torch.distributed as dist

from megappo.distributed.parallel import ParallelContext, all_gather_objects, barrier
from megappo.distributed.stacks import last_collective, stacks
from megappo.errors import EXIT_FAILED

EXCUSED = (
    "start", "resume", "generate", "score", "sleep", "sync", "validate", "save", "export", "profile"
)  # fmt: skip
"""Phases that wait for engines, rewards and files."""

_REPORT_S = 30.0
"""What writing a report gets before the ranks end without one."""

GRACE_S = 20.0
"""What a rank's main thread gets to end by itself after another rank failed."""


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """What a rank tells about itself."""

    rank: int
    step: int
    phase: str
    phases: int
    """begun so far; equal on all ranks that are at the same place"""
    moves: int
    """forward passes and phases so far"""
    pulse: int
    """messages so far"""
    pid: int
    host: str
    created: float
    """start of the process, Unix seconds: with pid and host it names the process for good"""


@dataclass(frozen=True, kw_only=True)
class HangReport:
    """What rank 0 found out about a run that does not move."""

    summary: str
    """One line: who is where, and since when."""
    text: str
    """All ranks, with stacks."""
    step: int
    ranks: tuple[int, ...]
    """The ranks that the others wait for, as far as it can be told."""


class Watchdog:
    """One rank's part. `enter` and `move` cost nothing; `start` is collective over the world.

    Args:
        context: this rank's place.
        address: of rank 0's machine, as the others reach it.
        timeout_s: without a move. 0: hangs are not looked for, failures are.
        on_hang: told on rank 0, from its thread, before all ranks end.
    """

    def __init__(
        self,
        context: ParallelContext,
        *,
        address: str,
        timeout_s: float,
        on_hang: Callable[[HangReport], None],
    ) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._on_hang = on_hang
        self._period_s = min(5.0, timeout_s / 10) if timeout_s else 5.0
        self._step, self._phase, self._phases, self._moves, self._pulse = 0, "start", 0, 0, 0
        self._created = psutil.Process().create_time()
        self._judge = Judge(timeout_s=timeout_s, period_s=self._period_s)
        self._stopping = threading.Event()
        self._news = threading.Event()
        self._failed_at: float | None = None
        self._store = _open_store(context, address)
        me = (socket.gethostname(), os.getpid(), self._created)
        everybody: list[tuple[str, int, float]] = all_gather_objects(me, context.world_group)
        self._neighbours = {
            rank: (pid, created)
            for rank, (host, pid, created) in enumerate(everybody)
            if host == me[0] and rank != context.rank
        }
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begins to watch; from here on this rank is missed."""
        self._publish()
        self._thread.start()

    def enter(self, step: int, phase: str) -> None:
        """The main thread begins a phase."""
        self._step, self._phase = step, phase
        self._phases += 1
        self._moves += 1
        self._news.set()

    def move(self) -> None:
        """The main thread has done a piece of work."""
        self._moves += 1

    def report_failure(self, text: str) -> None:
        """This rank ends because of an error; the others shall not wait for it."""
        try:
            self._store.compare_set("failure", "", json.dumps({"text": text}))
        except RuntimeError:  # rank 0 ended first, and with it the store: everybody knows
            return

    def stop(self) -> None:
        """Ends the watch on this rank. Where all ranks end well, `leave` comes first."""
        self._stopping.set()
        self._news.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            self._store.set(f"left{self._rank}", "1")
        except RuntimeError:  # rank 0 ended first, and with it the store: nobody asks any more
            return

    def leave(self) -> None:
        """Ends the watch on all ranks before the store goes. Collective over the world."""
        self.stop()
        barrier(self._context)

    def _watch(self) -> None:
        checked = time.monotonic()
        while True:
            # A new phase is told at once: a process that is stopped in it can no longer do so.
            self._news.wait(self._period_s)
            self._news.clear()
            if self._stopping.is_set():
                return
            try:
                self._publish()
                if time.monotonic() - checked < self._period_s:
                    continue
                checked = time.monotonic()
                failed = self._obey()
                if self._context.is_main and self._timeout_s:
                    self._look()
            except RuntimeError as error:  # torch's errors of a store whose process is gone
                failed = f"the watchdog's store on rank 0 does not answer: {error}"
            self._end_after_grace(failed)

    def _publish(self) -> None:
        self._pulse += 1
        told = Whereabouts(
            rank=self._context.rank,
            step=self._step,
            phase=self._phase,
            phases=self._phases,
            moves=self._moves,
            pulse=self._pulse,
            pid=os.getpid(),
            host=socket.gethostname(),
            created=self._created,
        )
        self._store.set(_key(told.rank), json.dumps(asdict(told)))

    def _obey(self) -> str:
        """Does what rank 0 asks for; which failure was reported, if any."""
        if self._store.check(["stacks"]) and not self._store.check([f"stacks{self._rank}"]):
            self._store.set(f"stacks{self._rank}", stacks() + last_collective())
        if self._store.check(["end"]):
            self._end()
        for rank, (pid, created) in self._neighbours.items():
            if not self._store.check([f"left{rank}"]) and not _is_alive(pid, created):
                self.report_failure(f"rank {rank} (pid {pid}) was killed")
        if not self._store.check(["failure"]):
            return ""
        return str(json.loads(self._store.get("failure"))["text"])

    def _look(self) -> None:
        told = [
            Whereabouts(**json.loads(self._store.get(_key(rank))))
            for rank in range(self._context.world_size)
            if self._store.check([_key(rank)])
        ]
        if not self._judge.is_hung(told, time.monotonic()):
            return
        self._store.set("stacks", "1")
        self._store.set(f"stacks{self._rank}", stacks() + last_collective())
        silent = self._judge.silent
        found = self._collect([w.rank for w in told if w.rank not in silent])
        report = self._judge.report(told, found)
        # The storage that it is written to may be what hangs.
        telling = threading.Thread(target=self._on_hang, args=(report,), daemon=True)
        telling.start()
        telling.join(_REPORT_S)
        dead = [asdict(w) for w in told if w.rank in silent]
        self._store.set("end", json.dumps(dead))
        time.sleep(2 * self._period_s)  # the others read it before the store goes
        self._end()

    def _collect(self, ranks: Sequence[int]) -> dict[int, str]:
        """What ranks hand in within a few periods."""
        deadline = time.monotonic() + 4 * self._period_s
        missing, found = list(ranks), {}
        while missing and time.monotonic() < deadline:
            for rank in list(missing):
                if self._store.check([f"stacks{rank}"]):
                    found[rank] = self._store.get(f"stacks{rank}").decode()
                    missing.remove(rank)
            time.sleep(self._period_s / 10)
        return found

    def _end_after_grace(self, why: str) -> None:
        """Ends this process if its main thread has not done so within `GRACE_S` of a failure."""
        now = time.monotonic()
        if not why:
            self._failed_at = None
            return
        self._failed_at = self._failed_at or now
        if now - self._failed_at > GRACE_S and not self._stopping.is_set():
            sys.stderr.write(f"watchdog: {why}; this rank ends\n")
            sys.stderr.flush()
            os._exit(EXIT_FAILED)

    def _end(self) -> None:
        """Ends this process, and those of this machine that can no longer do so themselves."""
        for process in json.loads(self._store.get("end")):
            if process["host"] == socket.gethostname():
                _kill(process["pid"], process["created"])
        os._exit(EXIT_FAILED)

    @property
    def _rank(self) -> int:
        return self._context.rank


class Judge:
    """Decides from what ranks tell whether the run hangs. Times are rank 0's own, monotonic."""

    def __init__(self, *, timeout_s: float, period_s: float) -> None:
        self._timeout_s = timeout_s
        self._patience_s = 3 * period_s + 5.0
        self._now = float("nan")
        self._pulses: dict[int, tuple[int, float]] = {}
        self._moves: dict[int, tuple[int, float]] = {}
        self.silent: tuple[int, ...] = ()
        """ranks whose thread does not answer"""

    def is_hung(self, told: Sequence[Whereabouts], now: float) -> bool:
        """Takes in what ranks told last; whether nothing moves for too long."""
        # After a pause of this process itself (a suspended machine), nobody is late.
        paused = now - self._now > self._patience_s
        for where in told:
            _note(self._pulses, where.rank, where.pulse, now, anew=paused)
            _note(self._moves, where.rank, where.moves, now, anew=paused)
        self._now = now
        self.silent = tuple(r for r in sorted(self._pulses) if self.quiet_s(r) > self._patience_s)
        answering = [w for w in told if w.rank not in self.silent]
        behind = min((w.phases for w in answering), default=0)
        # A rank that is ahead may wait for one that is stuck behind it, whatever its phase.
        excused = any(w.phase in EXCUSED for w in answering if w.phases == behind)
        lost = any(self.quiet_s(rank) > self._timeout_s for rank in self._pulses)
        still = any(self.still_s(w.rank) > self._timeout_s for w in told if w.phase not in EXCUSED)
        return lost or (still and not excused)

    def quiet_s(self, rank: int) -> float:
        """Seconds since a rank's thread was last heard."""
        return self._now - self._pulses[rank][1]

    def still_s(self, rank: int) -> float:
        """Seconds since a rank's main thread last moved."""
        return self._now - self._moves[rank][1]

    def report(self, told: Sequence[Whereabouts], found: Mapping[int, str]) -> HangReport:
        """Who is where, and who keeps the others waiting."""
        behind = min(w.phases for w in told)
        late = [w for w in told if w.phases == behind]
        to_blame = [w for w in told if w.rank in self.silent] or (
            late if len(late) < len(told) else []
        )
        blame = " and ".join(
            f"rank {w.rank} in step {w.step}, phase {w.phase}, "
            + (
                f"which does not answer for {self.quiet_s(w.rank):.0f} s (stopped, or lost)"
                if w.rank in self.silent
                else f"which has not moved for {self.still_s(w.rank):.0f} s"
            )
            for w in to_blame
        )
        steps = f"step {told[0].step}, phase {told[0].phase}"
        summary = f"the run hangs (watchdog.timeout_s {self._timeout_s:g}): " + (
            f"the others wait for {blame}" if blame else f"all ranks stand in {steps}"
        )
        parts = [summary, ""]
        for where in told:
            parts.append(
                f"rank {where.rank} (pid {where.pid} on {where.host}): step {where.step}, phase "
                f"{where.phase}; moved {self.still_s(where.rank):.0f} s ago, answered "
                f"{self.quiet_s(where.rank):.0f} s ago"
            )
        for rank, text in sorted(found.items()):
            parts += ["", f"== rank {rank}", text]
        return HangReport(
            summary=summary,
            text="\n".join(parts) + "\n",
            step=max(w.step for w in told),
            ranks=tuple(w.rank for w in to_blame),
        )


def _note(
    last: dict[int, tuple[int, float]], rank: int, count: int, now: float, *, anew: bool
) -> None:
    """Keeps since when a count is what it is."""
    if anew or rank not in last or last[rank][0] != count:
        last[rank] = (count, now)


def _key(rank: int) -> str:
    return f"rank{rank}"


def _open_store(context: ParallelContext, address: str) -> dist.TCPStore:
    """A store on a free port of rank 0, and every rank's way to it. Collective over the world."""
    timeout = datetime.timedelta(seconds=60)
    store = None
    if context.is_main:
        store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    port = all_gather_objects(store.port if store else None, context.world_group)[0]
    return store or dist.TCPStore(address, port, is_master=False, timeout=timeout)


def _is_alive(pid: int, created: float) -> bool:
    """Whether the process runs; one that ended and was not reaped yet does not."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - created) < 1.0
        return same and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _kill(pid: int, created: float) -> None:
    """SIGKILL to a process, unless it is gone and another has its number."""
    try:
        process = psutil.Process(pid)
        if abs(process.create_time() - created) < 1.0:
            process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return
