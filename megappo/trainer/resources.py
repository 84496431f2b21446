"""Memory of this rank, in GiB (2^30 bytes)."""

from __future__ import annotations

import psutil
import torch

GIB = 2.0**30


def resource_metrics(device: torch.device) -> dict[str, float]:
    """Host memory of this process; on CUDA also PyTorch's peak since the start."""
    found = {"perf/cpu_memory_used_gb": psutil.Process().memory_info().rss / GIB}
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        found["perf/max_memory_allocated_gb"] = peak / GIB
        found["perf/max_memory_share"] = (
            peak / torch.cuda.get_device_properties(device).total_memory
        )
    return found
