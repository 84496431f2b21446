"""Takes from this process, for good, what a program that a model wrote must not do. Linux only.

Two mechanisms of the kernel that need neither root nor namespaces, so they work in a container too:

- Landlock (Linux 5.13): no file is written, made, renamed or removed outside one folder; none of
  another process's memory or environment is read.
- seccomp: a filter of system calls. No socket (so no network), no new process and no other program,
  no signal to anyone, no tracing, no change of modes or owners. Threads stay possible.

With resource limits for time, memory and sizes there is then one process to kill, and nothing that
outlives it. Not restricted: reading files that this user may read; there is no way to send them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)

# Numbers of system calls: x86_64, aarch64; None where the architecture has no such call.
_CALLS: dict[str, tuple[int | None, int]] = {
    "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281),
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203),
    "io_uring_setup": (425, 425),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "setpgid": (109, 154), "setsid": (112, 157), "setrlimit": (160, 164), "prlimit64": (302, 261),
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, -1), "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54),
    "utime": (132, -1), "utimes": (235, -1), "futimesat": (261, -1), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "truncate": (76, 45), "mount": (165, 40), "umount2": (166, 39), "unshare": (272, 97),
    "setns": (308, 268), "bpf": (321, 280), "userfaultfd": (323, 282), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "perf_event_open": (298, 241),
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "sched_setaffinity": (203, 122), "setpriority": (141, 140), "sethostname": (170, 161),
}  # fmt: skip
_CLONE: dict[str, int] = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_CLONE_THREAD = 0x00010000

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_RULE_PATH_BENEATH = 1
# Rights over files, by the version of Landlock that brought them; all but reading and executing.
_WRITES = (1 << 1) | sum(1 << bit for bit in range(4, 13))
_SINCE = {2: 1 << 13, 3: 1 << 14}
"""Version 2: move between folders; version 3: truncate."""

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_SECCOMP_MODE_FILTER = 2
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


class CannotConfineError(RuntimeError):
    """This machine lacks what it takes; the message says what."""


def check() -> None:
    """Whether `confine` can work here; changes nothing.

    Raises:
        CannotConfineError: the system, its architecture or its kernel does not do.
    """
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in _CLONE:
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
    """A filter in classic BPF: 8 bytes an instruction (code, jump if true, if false, value)."""
    column = ("x86_64", "aarch64").index(machine)
    denied = sorted({n for pair in _CALLS.values() if (n := pair[column]) is not None and n >= 0})
    deny = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    program: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, 4),  # the architecture that the call is made for
        (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the number of the call
    ]
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL)]
    # glibc falls back to `clone` on ENOSYS, whose flags a filter can see.
    program += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    program += [step for number in denied for step in ((_EQUAL, 0, 1, number), deny)]
    program += [
        (_EQUAL, 0, 3, _CLONE[machine]),
        (_LOAD, 0, 0, 16),  # low half of the first argument; both machines are little-endian
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        deny,
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = b"".join(struct.pack("=HBBI", *step) for step in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("@HP", len(program), ctypes.addressof(buffer))
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
