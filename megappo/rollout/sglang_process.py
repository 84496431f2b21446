"""The processes behind one SGLang engine: start, calls with a deadline, death, end.

SGLang runs its request manager in the caller's process and the model in child processes. When one
of these dies, SGLang kills the caller, or leaves it waiting. Here the manager lives on a thread
with an event loop of its own, so that

- a call from the trainer waits with one eye on the children, and their death is an exception;
- SGLang installs no signal handler (Python allows that on the main thread alone);
- a trainer that is killed takes the children along: Linux ends them with the thread that started
  them, and this thread lives as long as the engine.

Left out: SGLang's detokenizer process. Token ids are the result; text is decoded here.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import multiprocessing
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Coroutine, Mapping
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import psutil

from megappo.rollout.engine import EngineDied
from megappo.rollout.isolation import trainer_kept

T = TypeVar("T")

_POLL_S = 0.5
_GRACE_AFTER_SIGQUIT_S = 10.0
_LOG_TAIL_LINES = 30


class SGLangProcess:
    """One running `sglang.Engine`. Must be created on the main thread."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        log_file: Path,
        environment: Mapping[str, str],
        start_timeout_s: float,
        exit_timeout_s: float,
    ) -> None:
        """Starts the engine and waits until it is ready.

        Args:
            arguments: of `sglang.Engine`.
            log_file: takes all output of the engine.
            environment: variables for the engine's processes.
            start_timeout_s: after it, the start counts as failed.
            exit_timeout_s: at the end, time for the processes to free device memory themselves
                before they are killed; 0 kills them at once.

        Raises:
            EngineDied: the engine did not start; the message ends with the end of its log.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("an SGLang engine must be started on the main thread, for SIGQUIT")
        self._log_file = log_file
        self._exit_timeout_s = exit_timeout_s
        self._children: list[BaseProcess] = []
        self._folder = Path(tempfile.mkdtemp(prefix="megappo-engine-"))
        self._sigquit_at: float | None = None
        self._unanswered: str | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._engine: Any = None
        self._closed = False
        self._sigquit_before = signal.signal(signal.SIGQUIT, self._on_sigquit)
        atexit.register(self.close)
        self._log = _divert_log(log_file)
        try:
            self._start(arguments, environment=environment, timeout_s=start_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def manager(self) -> Any:
        """SGLang's `TokenizerManager`; its coroutines run through `call`."""
        return self._engine.tokenizer_manager

    @property
    def pids(self) -> list[int]:
        """The engine's own child processes."""
        return [child.pid for child in self._children if child.pid is not None]

    def call(self, request: Coroutine[Any, Any, T], *, timeout_s: float, what: str) -> T:
        """Runs a coroutine of the manager to its end.

        Args:
            request: the coroutine.
            timeout_s: an engine that sends nothing for so long counts as dead. While it generates,
                SGLang sends every 50 tokens of a response.
            what: names the request in errors.

        Raises:
            EngineDied: a process of the engine is gone, or it fell silent.
        """
        return self.wait(self.submit(request, what=what), timeout_s=timeout_s, what=what)

    def submit(self, request: Coroutine[Any, Any, T], *, what: str) -> concurrent.futures.Future[T]:
        """Starts a coroutine of the manager; every future is to be given to `wait`.

        Raises:
            EngineDied: a process of the engine is gone.
        """
        try:
            self._raise_if_dead(what)
        except EngineDied:
            request.close()
            raise
        return asyncio.run_coroutine_threadsafe(request, self._engine.loop)

    def wait(self, future: concurrent.futures.Future[T], *, timeout_s: float, what: str) -> T:
        """The result of what `submit` started, as `call`; silence counts from now on."""
        heard, silent_since = self.manager.last_receive_tstamp, time.monotonic()
        try:
            while True:
                done, _ = concurrent.futures.wait([future], timeout=_POLL_S)
                if done:
                    return future.result()
                self._raise_if_dead(what)
                if self.manager.last_receive_tstamp != heard:
                    heard, silent_since = self.manager.last_receive_tstamp, time.monotonic()
                if time.monotonic() - silent_since > timeout_s:
                    # Whoever tidies up after this must not wait as long again.
                    self._unanswered = f"it did not answer within {timeout_s:g} s while {what}"
                    raise EngineDied(
                        f"SGLang did not answer within {timeout_s:g} s while {what}: raise "
                        f"timeout_s, or look for the cause in {self._log_file}\n{self._log_tail()}"
                    )
        finally:
            future.cancel()

    def close(self) -> None:
        """Ends the engine's processes, and only those; safe to call twice and on a dead engine."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._engine is not None:
            self._ask_to_exit()
        self._kill_children()
        if self._engine is not None:
            self._engine.loop.call_soon_threadsafe(self._engine.loop.stop)
            self._thread.join()
            atexit.unregister(self._engine.shutdown)
        shutil.rmtree(self._folder, ignore_errors=True)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGQUIT, self._sigquit_before or signal.SIG_DFL)
        _restore_log(self._log)

    def _start(
        self, arguments: Mapping[str, Any], *, environment: Mapping[str, str], timeout_s: float
    ) -> None:
        ready: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._run, args=(arguments, ready), name="sglang", daemon=True
        )
        before = set(multiprocessing.active_children())
        with trainer_kept(log_file=self._log_file, environment=environment):
            self._thread.start()
            try:
                self._engine = ready.result(timeout=timeout_s)
            except TimeoutError as error:
                raise EngineDied(
                    f"SGLang did not start within {timeout_s:g} s: raise start_timeout_s, or look "
                    f"for the cause in {self._log_file}\n{self._log_tail()}"
                ) from error
            except Exception as error:
                raise EngineDied(
                    f"SGLang did not start: {error}; its log is {self._log_file}\n"
                    f"{self._log_tail()}"
                ) from error
            finally:
                started = set(multiprocessing.active_children()) - before
                self._children = sorted(started, key=lambda child: child.pid or 0)

    def _run(self, arguments: Mapping[str, Any], ready: concurrent.futures.Future[Any]) -> None:
        """The thread: builds the engine, then serves its event loop until `close` stops it."""
        # Children inherit the mask. A launcher or a terminal signals the whole process group, and
        # Slurm every process of the job; the trainer then ends the step and the engine with it,
        # which it cannot if that dies first.
        # The tracker comes second, because its start unblocks SIGTERM and SIGINT.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        try:
            engine = _build_engine(arguments, folder=self._folder)
            loop = engine.loop
            manager = engine.tokenizer_manager
            # Ours in place of `auto_create_handle_loop`, whose wrapper answers an exception by
            # killing this process.
            manager.event_loop = loop
            self._receiver = loop.create_task(manager.handle_loop())
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(engine)
        try:
            loop.run_forever()
        finally:
            _close_loop(engine)

    def _raise_if_dead(self, what: str) -> None:
        if self._closed:
            raise EngineDied(f"the engine was shut down; {what} needs a new one")
        cause = self._cause_of_death()
        if cause is not None:
            raise EngineDied(
                f"SGLang died while {what}: {cause}; its log is {self._log_file}\n"
                f"{self._log_tail()}"
            )

    def _cause_of_death(self) -> str | None:
        for child in self._children:
            if not child.is_alive():
                return f"process {child.pid} ended with exit code {child.exitcode}"
        if self._receiver is not None and self._receiver.done():
            return f"its request manager stopped: {self._receiver.exception()!r}"
        if self._unanswered is not None:
            return self._unanswered
        quit_at = self._sigquit_at
        if quit_at is not None and time.monotonic() - quit_at > _GRACE_AFTER_SIGQUIT_S:
            return "it reported a failure by SIGQUIT"
        return None

    def _on_sigquit(self, _number: int, _frame: FrameType | None) -> None:
        """SGLang's children send SIGQUIT when they fail; left alone it would end the trainer."""
        self._sigquit_at = self._sigquit_at or time.monotonic()

    def _log_tail(self) -> str:
        if not self._log_file.exists():
            return "The log is empty."
        lines = self._log_file.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "The log ends with:\n" + "\n".join(lines)

    def _ask_to_exit(self) -> None:
        """Lets the schedulers free device memory themselves, which a kill may not."""
        from sglang.srt.managers.io_struct import ShutdownReq

        if self._exit_timeout_s == 0 or self._cause_of_death() is not None:
            return
        self._engine.loop.call_soon_threadsafe(
            self._engine.tokenizer_manager._dispatch_to_scheduler, ShutdownReq()
        )
        deadline = time.monotonic() + self._exit_timeout_s
        for child in self._children:
            child.join(timeout=max(0.0, deadline - time.monotonic()))

    def _kill_children(self) -> None:
        for child in self._children:
            for process in _family(child):
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue  # It ended between the listing and now.
            child.join()
            child.close()
        self._children = []


def _family(child: BaseProcess) -> list[psutil.Process]:
    """A child and its descendants that still run."""
    try:
        process = psutil.Process(child.pid)
        return [*process.children(recursive=True), process] if child.is_alive() else []
    except psutil.NoSuchProcess:
        return []


def _build_engine(arguments: Mapping[str, Any], *, folder: Path) -> Any:
    """An `sglang.Engine` without detokenizer, whose socket files lie in `folder`."""
    from sglang.srt.entrypoints.engine import Engine

    class ContainedEngine(Engine):  # type: ignore[misc]
        @classmethod
        def _launch_scheduler_processes(cls, server_args: Any, port_args: Any, run: Any) -> Any:
            # What a detokenizer would read goes straight to the manager, which takes ids as well.
            port_args.detokenizer_ipc_name = port_args.tokenizer_ipc_name
            return super()._launch_scheduler_processes(server_args, port_args, run)

        @classmethod
        def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[list[Any], list[str]]:
            return [], []

        def shutdown(self) -> None:
            """Nothing: SGLang's own kills every child of the trainer."""

    tempdir = tempfile.tempdir
    tempfile.tempdir = str(folder)
    try:
        engine = ContainedEngine(**arguments)
    finally:
        tempfile.tempdir = tempdir
    # It would answer a death with SIGQUIT to this process; `_cause_of_death` looks itself.
    engine.tokenizer_manager._subprocess_watchdog.stop()
    return engine


def _close_loop(engine: Any) -> None:
    """Cancels what still runs, closes sockets and shared memory. On the engine's thread."""
    loop, manager = engine.loop, engine.tokenizer_manager
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    for socket in (manager.recv_from_detokenizer, engine.send_to_rpc):
        socket.context.destroy(linger=0)
    manager.load_snapshot_reader.close()
    Path(manager.load_snapshot_reader.path).unlink(missing_ok=True)
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def _divert_log(log_file: Path) -> logging.FileHandler:
    """Sends the records of SGLang's part in this process to the engine's log, not the screen."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(log_file)
    handler.setFormatter(logging.Formatter("[%(asctime)s trainer] %(message)s"))
    logger = logging.getLogger("sglang")
    logger.addHandler(handler)
    logger.propagate = False
    return handler


def _restore_log(handler: logging.FileHandler) -> None:
    logger = logging.getLogger("sglang")
    logger.removeHandler(handler)
    logger.propagate = True
    handler.close()
