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

# Megatron-Core 0.16.1's buffers, and bytes of numbers.

PARAM_ALIGNMENT = 64
"""Elements: each parameter starts at a multiple in its buffer (param_and_grad_buffer.py:665)."""
BUFFER_ALIGNMENT = 128
"""Elements: a buffer is padded to a multiple of lcm(DP, this) (param_and_grad_buffer.py:654)."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
GRAD_BYTES = 4
"""Gradients are accumulated and reduced in float32 (`grad_reduce_in_fp32`)."""
MOMENT_BYTES = 8
"""Adam's two moments of a parameter, float32."""
MAIN_PARAM_BYTES = 4
"""The float32 copy of a bfloat16 parameter; float32 parameters need none."""

LOG_PROB_TEMPORARIES = 3
"""Float32 pieces of logits that exist at a time (distributed/vocab_parallel.py)."""
LOG_PROB_TEMPORARY_BYTES = 4 * 2**23
"""Of each: `CHUNK_ELEMENTS` there."""

# What cannot be derived: assumed, and not measured on a GPU by this project.

DEVICE_RESERVE_BYTES = 2 * GIB
"""CUDA context, NCCL's and the matrix libraries' buffers of one process."""
FRAGMENTATION = 0.05
"""Share of what the trainer allocates that lies between blocks of the caching allocator."""
ENGINE_RESERVE_BYTES = 2 * GIB
"""Of an engine beyond its share: CUDA context, graphs, activations; kept while it sleeps."""
FP8_COPY_BYTES = 2
"""Transformer Engine's fp8 copies of a weight, as it is and transposed, one byte each."""
FSDP_GATHERED_LAYERS = 2
"""Layers whose weights are whole at a time: the one that runs, and the next."""

FLOPS_EFFICIENCY = 0.6
"""Share of the peak that matrix products reach. Narayanan et al. 2021, table 1, report 44 to 52 %
of the peak for whole training steps on A100s, bubbles and communication included."""
MEMORY_EFFICIENCY = 0.8
"""Share of the memory bandwidth that a pass over memory reaches."""
LINK_EFFICIENCY = 0.8
"""Share of a link's bandwidth that large messages reach."""
HOST_BYTES_PER_S = 50 * GIGA
"""Between a device and pinned host memory, one direction: PCIe 5.0 x16 (64 GB/s) with overhead."""
DECODE_LATENCY_S = 20e-6
"""Launches and small collectives of one layer in one decoding step, with CUDA graphs."""
GPUS_PER_NODE = 8

# The search.

MAX_TP, MAX_CP = 8, 8
"""TP stays within a node; CP above this is for longer contexts than `rollout` knows."""
MIN_CP_TOKENS = 2048
"""Of the longest sample on each CP rank; smaller pieces keep no device busy."""
SEARCHED_VPP = (1, 2)


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
