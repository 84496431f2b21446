"""Keeps an engine's start from changing the trainer's process.

`sglang.Engine` is written to own its process. In a trainer's rank it would inherit torchrun's
rendezvous (and hang on it), set environment variables that Megatron needs otherwise, replace log
handlers, signal handlers, the event loop policy and multiprocessing's start method, and its
processes would write over the trainer's screen. The context managers here put all of that back.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megappo.errors import UserError

_TORCHRUN_PREFIXES = ("TORCHELASTIC_",)
_TORCHRUN_NAMES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    }
)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SIGNALS = (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT, signal.SIGCHLD)


@contextmanager
def trainer_kept(*, log_file: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Inside, the process is the engine's; after it, the trainer's as it was before.

    Args:
        log_file: takes what this process and the children it starts inside write to the screen;
            the children keep writing there.
        environment: variables for the engine's processes alone.
    """
    with ExitStack() as stack:
        stack.enter_context(_logging_kept())
        stack.enter_context(_signal_handlers_kept())
        stack.enter_context(_interpreter_kept())
        stack.enter_context(environment_kept(environment))
        stack.enter_context(output_to(log_file))
        yield


@contextmanager
def environment_kept(environment: Mapping[str, str]) -> Iterator[None]:
    """Hides torchrun's variables, exempts loopback from proxies, adds `environment`; undoes all."""
    before = dict(os.environ)
    for name in before:
        if name in _TORCHRUN_NAMES or name.startswith(_TORCHRUN_PREFIXES):
            del os.environ[name]
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in before.get(name, "").split(",") if host]
        os.environ[name] = ",".join(dict.fromkeys((*hosts, *_LOOPBACK)))
    os.environ.update(environment)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def output_to(log_file: Path) -> Iterator[None]:
    """Sends file descriptors 1 and 2 to the end of `log_file`, for this process and new children.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise UserError(
            f"the engine's log {log_file} cannot be written ({error.strerror}): set another one"
        ) from error
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [(fd, os.dup(fd)) for fd in (1, 2)]
    for fd, _ in saved:
        os.dup2(log, fd)
    os.close(log)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, copy in saved:
            os.dup2(copy, fd)
            os.close(copy)


@contextmanager
def _logging_kept() -> Iterator[None]:
    """Restores the root logger's handlers and the level of every logger that exists already."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    # Detached first: `logging.basicConfig(force=True)` closes the handlers that it finds.
    root.handlers[:] = []
    levels = {
        name: logger.level
        for name, logger in logging.Logger.manager.loggerDict.items()
        if isinstance(logger, logging.Logger)
    }
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        for name, before in levels.items():
            logging.getLogger(name).setLevel(before)


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    before = [(number, signal.getsignal(number)) for number in _SIGNALS]
    try:
        yield
    finally:
        for number, handler in before:
            # A handler that C code installed reads as None and cannot be set from Python.
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextmanager
def _interpreter_kept() -> Iterator[None]:
    """Restores multiprocessing's start method, asyncio's policy, GC thresholds, the stack limit."""
    start_method = multiprocessing.get_start_method(allow_none=True)
    policy = asyncio.get_event_loop_policy()
    thresholds = gc.get_threshold()
    stack_bytes, _ = resource.getrlimit(resource.RLIMIT_STACK)
    try:
        yield
    finally:
        multiprocessing.set_start_method(start_method, force=True)
        asyncio.set_event_loop_policy(policy)
        gc.set_threshold(*thresholds)
        # Every later thread would reserve it. The raised limit on open files is welcome, and stays.
        resource.setrlimit(
            resource.RLIMIT_STACK, (stack_bytes, resource.getrlimit(resource.RLIMIT_STACK)[1])
        )
