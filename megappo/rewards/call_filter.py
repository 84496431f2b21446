"""Which system calls a program that a model wrote may make: a seccomp filter in classic BPF.

Most calls are denied by their number. A few that every program needs are looked into:

- `clone` makes threads alone;
- `open` and `openat` empty no file that they do not open for writing: Landlock knows emptying from
  Linux 6.2 on, and before it denies opening for writing alone;
- `fcntl` and `ioctl` have no file tell another process anything, which is a signal;
- `ioctl` asks for what terminals and pipes have, nothing of a file system or a device;
- `prctl` does not take back that the process ends with its supervisor.

Not here: what needs a capability, for those are dropped.
"""

from __future__ import annotations

import errno
import os
import struct

Step = tuple[int, int, int, int]
"""An instruction: code, steps to skip if true, if false, value."""

# Numbers of system calls: x86_64, aarch64; -1 where the architecture has no such call.
_DENIED: dict[str, tuple[int, int]] = {
    "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281),
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203),
    "io_uring_setup": (425, 425),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "setpgid": (109, 154), "setsid": (112, 157), "setrlimit": (160, 164), "prlimit64": (302, 261),
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, -1), "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54),
    "utime": (132, -1), "utimes": (235, -1), "futimesat": (261, -1), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "removexattrat": (466, 466), "file_setattr": (469, 469), "open_by_handle_at": (304, 265),
    "truncate": (76, 45), "mount": (165, 40), "umount2": (166, 39), "unshare": (272, 97),
    "setns": (308, 268), "bpf": (321, 280), "userfaultfd": (323, 282), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "perf_event_open": (298, 241),
    # Memory, queues and semaphores that others have made go by a number that is easily found.
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "mq_timedsend": (242, 182),
    "mq_timedreceive": (243, 183), "mq_notify": (244, 184),
    "sched_setaffinity": (203, 122), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "sched_setscheduler": (144, 119), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "sethostname": (170, 161),
}  # fmt: skip
# Their flags lie in memory, where a filter cannot see them. glibc falls back to `clone`; nothing
# of Python's needs `openat2`.
_UNKNOWN: dict[str, tuple[int, int]] = {"clone3": (435, 435), "openat2": (437, 437)}
_LOOKED_INTO: dict[str, tuple[int, int]] = {
    "clone": (56, 220), "open": (2, -1), "openat": (257, 56), "fcntl": (72, 25),
    "ioctl": (16, 29), "prctl": (157, 167),
}  # fmt: skip
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MACHINES = tuple(_ARCHITECTURES)
"""For which there is a filter."""
_X32_BIT = 0x40000000

_CLONE_THREAD = 0x00010000
_F_SETFL, _F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_SETLEASE = 4, 8, 10, 15, 1024
_O_ASYNC = 0x2000
_TERMINAL_CALLS = (0x5401, 0x802C542A, 0x5413)  # TCGETS, TCGETS2, TIOCGWINSZ
_PIPE_CALLS = (0x541B, 0x5421, 0x5450, 0x5451)  # FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_PR_SET_PDEATHSIG = 1

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_KILL: Step = (_RETURN, 0, 0, 0x80000000)
_ALLOW: Step = (_RETURN, 0, 0, 0x7FFF0000)
_DENY: Step = (_RETURN, 0, 0, 0x00050000 | errno.EPERM)
_NO_SUCH_CALL: Step = (_RETURN, 0, 0, 0x00050000 | errno.ENOSYS)


def call_filter(machine: str) -> bytes:
    """The program that `PR_SET_SECCOMP` takes, 8 bytes an instruction.

    Args:
        machine: one of `MACHINES`.
    """
    column = MACHINES.index(machine)
    steps: list[Step] = [
        (_LOAD, 0, 0, 4),  # the architecture that the call is made for
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        _KILL,
        (_LOAD, 0, 0, 0),  # the number of the call
    ]
    if machine == "x86_64":
        steps += [(_AT_LEAST, 0, 1, _X32_BIT), _KILL]
    decisions: dict[str, list[Step]] = {
        **{name: _looked_into(name) for name in _LOOKED_INTO},
        **{name: [_NO_SUCH_CALL] for name in _UNKNOWN},
        **{name: [_DENY] for name in _DENIED},
    }
    numbers = {**_LOOKED_INTO, **_UNKNOWN, **_DENIED}
    for name, decision in decisions.items():
        if (number := numbers[name][column]) >= 0:
            steps += [(_EQUAL, 0, len(decision), number), *decision]
    return b"".join(struct.pack("=HBBI", *step) for step in [*steps, _ALLOW])


def _looked_into(name: str) -> list[Step]:
    """What is decided by a call's arguments; it ends in a verdict whatever they are."""
    match name:
        case "clone":
            return [_argument(0), (_ANY_BIT, 1, 0, _CLONE_THREAD), _DENY, _ALLOW]
        case "open" | "openat":
            return [
                _argument(1 if name == "open" else 2),
                (_ANY_BIT, 1, 0, os.O_TRUNC),
                _ALLOW,
                # Not only reading: 3 asks for neither, and empties a file all the same.
                (_AND, 0, 0, os.O_ACCMODE),
                *_each((os.O_WRONLY, os.O_RDWR), _ALLOW),
                _DENY,
            ]
        case "fcntl":
            return [
                _argument(1),
                *_each((_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_SETLEASE), _DENY),
                (_EQUAL, 1, 0, _F_SETFL),
                _ALLOW,
                # A terminal's owner are those who work on it, without being named.
                _argument(2),
                (_ANY_BIT, 0, 1, _O_ASYNC),
                _DENY,
                _ALLOW,
            ]
        case "ioctl":
            return [_argument(1), *_each((*_TERMINAL_CALLS, *_PIPE_CALLS), _ALLOW), _DENY]
        case _:
            assert name == "prctl", name
            return [_argument(0), *_each((_PR_SET_PDEATHSIG,), _DENY), _ALLOW]


def _argument(index: int) -> Step:
    """Loads its low half, all that the kernel looks at here; both machines are little-endian."""
    return (_LOAD, 0, 0, 16 + 8 * index)


def _each(values: tuple[int, ...], verdict: Step) -> list[Step]:
    return [step for value in values for step in ((_EQUAL, 0, 1, value), verdict)]
