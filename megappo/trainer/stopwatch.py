"""Where a step's time goes: named phases, and what lies between them as `other`.

A phase is also marked for PyTorch's profiler, which costs microseconds where none runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function

PHASES = (
    "generate",
    "score",
    "sleep",
    "balance",
    "log_probs",
    "ref",
    "values",
    "advantages",
    "update_critic",
    "update_actor",
    "sync",
)


class Stopwatch:
    """Sums seconds by phase. On CUDA a phase ends when the device has caught up.

    Args:
        device: of this rank.
        on_phase: hears the name of each phase that begins.
    """

    def __init__(
        self, device: torch.device, *, on_phase: Callable[[str], None] = lambda name: None
    ) -> None:
        self._device = device
        self._on_phase = on_phase
        self._started = time.perf_counter()
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the block's duration to one phase."""
        self._on_phase(name)
        start = time.perf_counter()
        with record_function(f"phase/{name}"):
            yield
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        self.seconds[name] += time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """`timing_s/<phase>`, `timing_s/step` and the rest as `timing_s/other`, seconds."""
        whole = time.perf_counter() - self._started
        named = {f"timing_s/{name}": s for name, s in self.seconds.items()}
        other = whole - sum(self.seconds.values())
        return {**named, "timing_s/step": whole, "timing_s/other": other}
