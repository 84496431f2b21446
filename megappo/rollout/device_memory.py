"""Waits until memory that another process gave back is really free.

SGLang answers a release when its own calls have returned; the driver may need longer, and a trainer
that goes on too early runs out of memory. So free memory is looked at, not assumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from megappo.rollout.engine import EngineRefused

GIB = 2.0**30

_POLL_S = 0.05
_SHARE = 0.9
"""Of the expected bytes; an engine's account of its memory is rounded, and taken at its start."""


def free_bytes(device: int) -> int:
    """Memory of a CUDA device that no process holds."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def wait_until_released(
    free: Callable[[], int], *, before: int, expected: int, timeout_s: float
) -> int:
    """Polls until free memory has risen by what was expected.

    Args:
        free: bytes that are free now.
        before: bytes that were free before the release.
        expected: bytes that the release should bring; nine tenths of it will do.
        timeout_s: after it the release counts as failed.

    Returns:
        The bytes by which free memory rose.

    Raises:
        EngineRefused: they did not come free in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        released = free() - before
        if released >= _SHARE * expected:
            return released
        if time.monotonic() > deadline:
            raise EngineRefused(
                f"the engine sleeps, but only {released / GIB:.2f} of {expected / GIB:.2f} GiB of "
                f"device memory came free within {timeout_s:g} s: another process may be taking "
                "it, or torch_memory_saver is not in use (the engine's log says)"
            )
        time.sleep(_POLL_S)
