"""SGLang plug-in that leaves no process behind when the trainer is killed while an engine starts.

SGLang's processes ask the kernel for a SIGKILL at their parent's end. The kernel does not look
back: to one whose parent is gone already nothing comes, and it would load its model, find nobody to
talk to, and send SIGQUIT to whoever has adopted it. A process takes seconds from its start to that
request, so here it asks first and then looks whether the parent is still there.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""Linux's prctl option: the signal that this process gets when its parent ends."""


def end_with_parent() -> None:
    """For spawned processes, from now on; one whose parent is gone ends here. Linux only."""
    parent = multiprocessing.parent_process()
    if parent is None or not sys.platform.startswith("linux"):
        return
    ask_for_end()
    if not parent.is_alive():
        os._exit(1)


def ask_for_end() -> None:
    """Of this process, at its parent's. To be called before SGLang, which takes long to import.

    So early, multiprocessing does not tell who the parent was: `end_with_parent` looks later. Linux
    only.
    """
    if not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
