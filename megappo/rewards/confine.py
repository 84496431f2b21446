"""Takes from this process, for good, what a program that a model wrote must not do. Linux only.

Two mechanisms of the kernel that need neither root nor namespaces, so they work in a container too:

- Landlock (Linux 5.13): no file is written, made, renamed or removed outside one folder; none of
  another process's memory or environment is read.
- seccomp: a filter of system calls, see `call_filter`. No socket (so no network), no new process
  and no other program, no signal to anyone, no tracing, no change of modes or owners, and no
  emptying of files, which Landlock denies from Linux 6.2 on alone. Threads stay possible.

With resource limits for time, memory and sizes there is then one process to kill, and nothing that
outlives it. Not restricted: reading files that this user may read; there is no way to send them.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
from pathlib import Path

from megappo.rewards.call_filter import MACHINES, call_filter

_LIBC = ctypes.CDLL(None, use_errno=True)

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_RULE_PATH_BENEATH = 1
# Rights over files, by the version of Landlock that brought them; all but reading and executing.
_WRITES = (1 << 1) | sum(1 << bit for bit in range(4, 13))
_SINCE = {2: 1 << 13, 3: 1 << 14}
"""Version 2: move between folders; version 3: truncate, which `call_filter` denies as well."""

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_SECCOMP_MODE_FILTER = 2


class CannotConfineError(RuntimeError):
    """This machine lacks what it takes; the message says what."""


def check() -> None:
    """Whether `confine` can work here; changes nothing.

    Raises:
        CannotConfineError: the system, its architecture or its kernel does not do.
    """
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in MACHINES:
        raise CannotConfineError(
            f"programs are confined on Linux on x86_64 and aarch64, not on {platform.system()} on "
            f"{machine}"
        )
    if _landlock_version() < 1:
        raise CannotConfineError(
            "this kernel does not offer Landlock (Linux 5.13 or newer, with 'landlock' in the "
            "kernel's lsm list), which keeps programs from writing outside their folder"
        )


def confine(folder: Path, *, cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """Confines this process, once and for all; call it in a process with one thread.

    Args:
        folder: the only place that can be written to.
        cpu_s: seconds of CPU time, of all threads; the kernel ends the process after it.
        memory_bytes: of address space; more is a `MemoryError`.
        file_bytes: largest file that can be written.

    Raises:
        CannotConfineError: see `check`.
    """
    check()
    for limit, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _drop_capabilities()
    _restrict_files(folder)
    _filter_calls(platform.machine())


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when the thread that started it ends.

    Args:
        parent: its process id, read before the fork: it may be gone by now.
    """
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Descendants of this process whose parents end become its children, not those of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _drop_capabilities() -> None:
    """What root may do beyond others, such as reading any process's environment."""
    head = struct.pack("=Ii", 0x20080522, 0)  # the third version of the call, this process
    nothing = struct.pack("=6I", *[0] * 6)
    _checked(_LIBC.capset(ctypes.c_char_p(head), ctypes.c_char_p(nothing)), "capset")


def _landlock_version() -> int:
    return int(_LIBC.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))


def _restrict_files(folder: Path) -> None:
    version = _landlock_version()
    rights = _WRITES | sum(bit for since, bit in _SINCE.items() if version >= since)
    ruleset = _checked(
        _LIBC.syscall(
            _LANDLOCK_CREATE, ctypes.c_char_p(struct.pack("=Q", rights)), ctypes.c_size_t(8), 0
        ),
        "landlock_create_ruleset",
    )
    _allow_below(ruleset, folder, rights)
    # Written by much of what runs; it keeps nothing.
    _allow_below(ruleset, Path(os.devnull), 1 << 1)
    _checked(_LIBC.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _allow_below(ruleset: int, path: Path, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=Qi", rights, place)
    _checked(
        _LIBC.syscall(_LANDLOCK_ADD, ruleset, _RULE_PATH_BENEATH, ctypes.c_char_p(rule), 0),
        "landlock_add_rule",
    )
    os.close(place)


def _filter_calls(machine: str) -> None:
    code = call_filter(machine)
    buffer = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(head))


def _prctl(option: int, value: int, pointer: ctypes.c_char_p | None = None) -> None:
    _checked(
        _LIBC.prctl(
            ctypes.c_int(option),
            ctypes.c_ulong(value),
            pointer,
            ctypes.c_ulong(0),
            ctypes.c_ulong(0),
        ),
        f"prctl({option})",
    )


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise CannotConfineError(f"{what} failed: {os.strerror(number)}")
    return result
