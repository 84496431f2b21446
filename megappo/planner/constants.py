"""Every constant of the planner that is not a layout's or a model's: devices, and what was assumed.

Device figures are those of the vendor's public datasheets: dense bfloat16 products (without
sparsity), memory and its bandwidth, and links in one direction. A datasheet's GB counts 10^9 bytes
here; devices report a little more, which is left as a reserve. The network is one 400 Gb/s port a
device (100 Gb/s for L40S), as in the vendor's reference designs; yours may differ.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of device."""

    name: str
    words: tuple[str, ...]
    """All of them stand in the name that the driver reports."""
    memory_bytes: float
    flops_per_s: float
    """Dense bfloat16 operations."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """To the other devices of its node, one direction."""
    network_bytes_per_s: float
    """To other nodes, one direction, for one device."""
    source: str


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="h100-80gb",
            words=("H100", "80GB", "HBM3"),
            memory_bytes=80 * GIGA,
            flops_per_s=989.4 * TERA,
            memory_bytes_per_s=3.35 * TERA,
            link_bytes_per_s=450 * GIGA,
            network_bytes_per_s=50 * GIGA,
            source="NVIDIA H100 datasheet, SXM5",
        ),
        Gpu(
            name="h200",
            words=("H200",),
            memory_bytes=141 * GIGA,
            flops_per_s=989.4 * TERA,
            memory_bytes_per_s=4.8 * TERA,
            link_bytes_per_s=450 * GIGA,
            network_bytes_per_s=50 * GIGA,
            source="NVIDIA H200 datasheet, SXM",
        ),
        Gpu(
            name="b200",
            words=("B200",),
            memory_bytes=180 * GIGA,
            flops_per_s=2250 * TERA,
            memory_bytes_per_s=8.0 * TERA,
            link_bytes_per_s=900 * GIGA,
            network_bytes_per_s=50 * GIGA,
            source="NVIDIA DGX B200 datasheet, an eighth of it; bfloat16 without sparsity",
        ),
        Gpu(
            name="a100-80gb",
            words=("A100", "80GB"),
            memory_bytes=80 * GIGA,
            flops_per_s=312 * TERA,
            memory_bytes_per_s=2.039 * TERA,
            link_bytes_per_s=300 * GIGA,
            network_bytes_per_s=25 * GIGA,
            source="NVIDIA A100 datasheet, SXM4 80 GB",
        ),
        Gpu(
            name="a100-40gb",
            words=("A100", "40GB"),
            memory_bytes=40 * GIGA,
            flops_per_s=312 * TERA,
            memory_bytes_per_s=1.555 * TERA,
            link_bytes_per_s=300 * GIGA,
            network_bytes_per_s=25 * GIGA,
            source="NVIDIA A100 datasheet, SXM4 40 GB",
        ),
        Gpu(
            name="l40s",
            words=("L40S",),
            memory_bytes=48 * GIGA,
            flops_per_s=362.05 * TERA,
            memory_bytes_per_s=0.864 * TERA,
            link_bytes_per_s=32 * GIGA,
            network_bytes_per_s=12.5 * GIGA,
            source="NVIDIA L40S datasheet; PCIe 4.0 x16, no NVLink",
        ),
    )
}


def gpu_of_device(device_name: str) -> Gpu | None:
    """The kind of a device by the name that its driver reports; None for one that is not listed.

    `NVIDIA H100 80GB HBM3` is known. A PCIe or NVL variant has other figures and is not listed.
    """
    return next(
        (gpu for gpu in GPUS.values() if all(word in device_name for word in gpu.words)), None
    )
