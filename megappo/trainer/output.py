"""Keeps the screen for the run's own lines: what Megatron, SGLang and PyTorch print goes to files.

`logs/rank_00000.log` takes this process's stdout and stderr, file descriptors included, so that the
engine's processes and C++ code are caught too.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO


@dataclass(frozen=True, kw_only=True)
class Screen:
    """The user's own stdout and stderr, from before they were redirected."""

    out: TextIO
    err: TextIO


def redirect_to(log_file: Path) -> Screen:
    """Sends descriptors 1 and 2 of this process to a file, from here on."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    screen = Screen(
        out=os.fdopen(os.dup(1), "w", buffering=1), err=os.fdopen(os.dup(2), "w", buffering=1)
    )
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    return screen
