"""What this machine has. It only looks: nothing is started or written, and nothing judged here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from megappo.distributed.host_memory import available_bytes
from megappo.rollout.ports import block_of, num_free_ports

PACKAGES = (
    "torch",
    "megatron-core",
    "transformers",
    "sglang",
    "sglang-kernel",
    "transformer-engine",
    "apex",
    "torch-memory-saver",
    "flashinfer-python",
    "einops",
    "math-verify",
)
_DRIVER = Path("/proc/driver/nvidia/version")
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One CUDA device as PyTorch sees it."""

    name: str
    memory_bytes: int
    capability: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts; sizes in bytes."""

    host: str
    python: str
    packages: dict[str, str]
    """installed version by name; absent ones are left out"""
    gpus: tuple[Gpu, ...]
    driver: str
    """NVIDIA's kernel module; empty without one"""
    cuda: str
    """that PyTorch was built for; empty for a CPU build"""
    nccl: str
    apex_is_nvidias: bool
    """False too where there is none"""
    num_cpus: int
    """that this process may use"""
    memory_bytes: int
    available_bytes: int
    """until the machine or a control group runs out"""
    shm_bytes: int
    shm_free_bytes: int
    open_files_soft: int
    open_files_hard: int
    ports: tuple[int, int]
    """first and last of those that engines of the ranks here choose from"""
    num_free_ports: int
    """of them"""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def look(*, ranks: int | None = None) -> Machine:
    """Asks PyTorch, the kernel and the installed packages.

    Args:
        ranks: whose engines' ports are looked at; None: as many as GPUs, or 1.
    """
    import torch

    local_ranks = range(ranks or torch.cuda.device_count() or 1)
    on_cuda = torch.cuda.is_available()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shm = shutil.disk_usage(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None
    return Machine(
        host=socket.gethostname(),
        python=platform.python_version(),
        packages={name: found for name in PACKAGES if (found := version_of(name))},
        gpus=tuple(_gpu(torch, number) for number in range(torch.cuda.device_count())),
        driver=driver_version(_DRIVER),
        cuda=torch.version.cuda or "",
        nccl=".".join(str(part) for part in torch.cuda.nccl.version()) if on_cuda else "",
        apex_is_nvidias=apex_is_nvidias(),
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=int(psutil.virtual_memory().total),
        available_bytes=available_bytes(),
        shm_bytes=shm.total if shm else 0,
        shm_free_bytes=shm.free if shm else 0,
        open_files_soft=soft,
        open_files_hard=hard,
        ports=(block_of(0)[0], block_of(local_ranks[-1])[-1]),
        num_free_ports=sum(num_free_ports(rank) for rank in local_ranks),
    )


def version_of(package: str) -> str:
    """Installed version; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def driver_version(path: Path) -> str:
    """Version of NVIDIA's kernel module; empty where it is not loaded."""
    try:
        text = path.read_text()
    except OSError:
        return ""
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+[.\d]*)", text)
    return found[1] if found else ""


def apex_is_nvidias() -> bool:
    """Whether `apex` is NVIDIA's, and not the unrelated package of that name on the index."""
    if importlib.util.find_spec("apex") is None:
        return False
    return importlib.util.find_spec("apex.multi_tensor_apply") is not None


def _gpu(torch: Any, number: int) -> Gpu:
    properties = torch.cuda.get_device_properties(number)
    return Gpu(
        name=properties.name,
        memory_bytes=int(properties.total_memory),
        capability=f"{properties.major}.{properties.minor}",
    )
