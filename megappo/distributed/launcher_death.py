"""Ranks that end with the launcher that started them. Light to import: called before torch is.

torchrun's ranks have sessions of their own: after a SIGKILL of the launcher alone they would train
on, unseen, and write into the folder that the restarted run uses.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

LAUNCHER_PID = "MEGAPPO_LAUNCHER_PID"
"""Variable by which `megappo.launch` tells its ranks who it is."""

_PR_SET_PDEATHSIG = 1
"""Linux's prctl option: the signal that this process gets when its parent ends."""


def die_with_launcher() -> None:
    """Asks the kernel to kill this process when its launcher is gone. Linux only.

    The kernel does not look back: a launcher that ended while this process started is told by its
    process id, which only `megappo.launch` passes on. Under plain torchrun today's parent counts.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or not sys.platform.startswith("linux"):
        return
    launcher = int(os.environ.get(LAUNCHER_PID, os.getppid()))
    result = ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if result != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGKILL)
