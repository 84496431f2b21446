"""The filter's verdicts on both architectures, read by an interpreter of its own."""

import errno
import fcntl
import os
import struct

import pytest

from megappo.rewards.call_filter import call_filter

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# From the kernel's tables, by hand: what the filter knows them as is under test.
OPENAT, FCNTL, IOCTL = {"x86_64": 257, "aarch64": 56}, {"x86_64": 72, "aarch64": 25}, {
    "x86_64": 16, "aarch64": 29,
}  # fmt: skip
PRCTL, CLONE = {"x86_64": 157, "aarch64": 167}, {"x86_64": 56, "aarch64": 220}
EPERM, ENOSYS, ALLOWED, KILLED = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x7FFF0000, 1 << 31


def verdict(machine, number, *arguments, audit=None):
    """What the kernel does with a call, by the rules of classic BPF."""
    code = call_filter(machine)
    given = [argument % 2**64 for argument in arguments] + [0] * (6 - len(arguments))
    call = struct.pack("<IIQ6Q", number, AUDIT[machine] if audit is None else audit, 0, *given)
    at, value = 0, 0
    while True:
        kind, if_true, if_false, operand = struct.unpack_from("=HBBI", code, 8 * at)
        at += 1
        match kind:
            case 0x20:
                (value,) = struct.unpack_from("<I", call, operand)
            case 0x54:
                value &= operand
            case 0x06:
                return operand
            case _:
                tests = {0x15: value == operand, 0x35: value >= operand, 0x45: value & operand}
                at += if_true if tests[kind] else if_false


both = pytest.mark.parametrize("machine", ["x86_64", "aarch64"])


@both
@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (os.O_RDONLY, ALLOWED),
        (os.O_RDONLY | os.O_TRUNC, EPERM),
        (os.O_RDONLY | os.O_TRUNC | os.O_CREAT | os.O_CLOEXEC, EPERM),
        (os.O_ACCMODE | os.O_TRUNC, EPERM),  # opened for neither, emptied all the same
        (os.O_WRONLY | os.O_TRUNC | os.O_CREAT, ALLOWED),  # Landlock decides by the folder
        (os.O_RDWR | os.O_TRUNC, ALLOWED),
        (os.O_RDWR | os.O_TRUNC | 1 << 32, ALLOWED),  # the kernel looks at the low half alone
        (os.O_RDONLY | os.O_TRUNC | 1 << 32, EPERM),
    ],
)
def test_a_file_is_emptied_only_by_opening_it_for_writing(machine, flags, found):
    assert verdict(machine, OPENAT[machine], -100, 0, flags) == found
    if machine == "x86_64":
        assert verdict(machine, 2, 0, flags) == found


@both
@pytest.mark.parametrize(
    ("command", "argument", "found"),
    [
        (8, 1, EPERM),  # F_SETOWN
        (10, 9, EPERM),  # F_SETSIG
        (15, 0, EPERM),  # F_SETOWN_EX
        (1024, 0, EPERM),  # F_SETLEASE
        (fcntl.F_SETFL, os.O_NONBLOCK, ALLOWED),
        (fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC, EPERM),
        (fcntl.F_GETFL, os.O_ASYNC, ALLOWED),
        (fcntl.F_DUPFD_CLOEXEC, 3, ALLOWED),
        (fcntl.F_SETFD, fcntl.FD_CLOEXEC, ALLOWED),
    ],
)
def test_a_file_cannot_be_made_to_send_signals(machine, command, argument, found):
    assert verdict(machine, FCNTL[machine], 3, command, argument) == found


@both
@pytest.mark.parametrize(
    ("command", "found"),
    [
        (0x5401, ALLOWED),  # TCGETS, by which isatty asks
        (0x5413, ALLOWED),  # TIOCGWINSZ
        (0x5451, ALLOWED),  # FIOCLEX
        (0x8901, EPERM),  # FIOSETOWN
        (0x8902, EPERM),  # SIOCSPGRP
        (0x5452, EPERM),  # FIOASYNC
        (0x5412, EPERM),  # TIOCSTI, a key that nobody pressed
        (0x40086602, EPERM),  # FS_IOC_SETFLAGS
        (0x40806685, EPERM),  # FS_IOC_ENABLE_VERITY: the file can never be written again
    ],
)
def test_ioctl_asks_and_changes_nothing(machine, command, found):
    assert verdict(machine, IOCTL[machine], 3, command, 0) == found


@both
def test_only_threads_are_made_and_the_end_with_the_parent_stays(machine):
    assert verdict(machine, CLONE[machine], 0x00010000 | 0x100) == ALLOWED
    assert verdict(machine, CLONE[machine], 17) == EPERM
    assert verdict(machine, PRCTL[machine], 1, 0) == EPERM  # PR_SET_PDEATHSIG
    assert verdict(machine, PRCTL[machine], 15, 0) == ALLOWED  # PR_SET_NAME


@both
def test_calls_of_another_architecture_end_the_program(machine):
    assert verdict(machine, 1, audit=0x40000003) == KILLED  # 32 bits of x86
    assert verdict("x86_64", 0x40000000 | 1) == KILLED  # x32
    assert verdict(machine, 435) == verdict(machine, 437) == ENOSYS  # clone3, openat2


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("kill", (62, 129)),
        ("shmctl", (31, 195)),
        ("shmat", (30, 196)),
        ("semctl", (66, 191)),
        ("msgrcv", (70, 188)),
        ("mq_unlink", (241, 181)),
        ("sched_setscheduler", (144, 119)),
        ("ioprio_set", (251, 30)),
        ("setxattrat", (463, 463)),
        ("file_setattr", (469, 469)),
        ("open_by_handle_at", (304, 265)),
    ],
)
def test_what_reaches_others_is_denied(name, numbers):
    assert verdict("x86_64", numbers[0]) == verdict("aarch64", numbers[1]) == EPERM, name
    assert verdict("x86_64", 0) == verdict("aarch64", 63) == ALLOWED  # read
