"""Random streams of one rank: torch's, and Megatron's of the parallel regions.

Prompts, seeds of samples and new weights come from `trainer.seed` and counters alone; no stream is
drawn for them, so they do not depend on what is restored here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """Copies of all streams."""
    from megatron.core import tensor_parallel

    streams = {
        "torch": torch.get_rng_state(),
        "megatron": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }
    if torch.cuda.is_initialized():  # not by a run on the CPU of a machine that has a GPU
        streams["cuda"] = torch.cuda.get_rng_state()
    return streams


def restore(streams: Mapping[str, Any]) -> None:
    """Sets all streams to what `capture` gave on the same kind of device."""
    from megatron.core import tensor_parallel

    torch.set_rng_state(streams["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(streams["megatron"])
    if "cuda" in streams and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(streams["cuda"])


def restart(seed: int, step: int) -> None:
    """As a new run of seed + step: where the saved streams are of other ranks or devices."""
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(seed + step)
    torch.manual_seed(seed + step)
