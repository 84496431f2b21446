"""What a run needs of a machine, held against what the machine has."""

from __future__ import annotations

import math
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megappo.config import Config, SupervisedConfig
from megappo.config.lora import LoraSection
from megappo.distributed.cpu_backend import TESTED_MEGATRON
from megappo.doctor.image import RULE_OF_ENGINE, SGLANG_KERNEL, TESTED_SGLANG, fits, public
from megappo.doctor.machine import Machine
from megappo.errors import ModelError, UserError
from megappo.models.name_map import hf_names
from megappo.models.spec import ModelSpec, load_spec
from megappo.rollout.file_limit import NEEDED_FILES
from megappo.rollout.ports import reserve_ports

GIB = 2**30
_ENGINE_BYTES = 3 * GIB // 2
"""Host memory of an engine's three processes, without weights (measured on CPU)."""


AnyConfig = Config | SupervisedConfig


@dataclass(frozen=True, kw_only=True)
class Line:
    """One need: what it is, what was found, and, if that is not enough, what to do."""

    state: Literal["ok", "missing", "note"]
    what: str
    found: str
    remedy: str = ""


def needs(
    config: AnyConfig, machine: Machine, *, ranks: int, environment: Mapping[str, str] = os.environ
) -> list[Line]:
    """Every need of a run with `ranks` ranks on this machine; engines are PPO's alone."""
    on_cuda = config.device == "cuda" or (config.device == "auto" and bool(machine.gpus))
    return [
        *_device(config, machine, ranks=ranks, on_cuda=on_cuda),
        *_packages(config, machine, on_cuda=on_cuda),
        *_shared_memory(config, machine, ranks=ranks, on_cuda=on_cuda),
        *(_open_files(machine) if isinstance(config, Config) else ()),
        *_room(config, machine, ranks=ranks),
        *(_ports(ranks) if _starts_sglang(config) else ()),
        *_nodes(environment),
    ]


def _judge(holds: bool, what: str, found: str, remedy: str) -> Line:
    return Line(
        state="ok" if holds else "missing", what=what, found=found, remedy="" if holds else remedy
    )


def _starts_sglang(config: AnyConfig) -> bool:
    """Whether the run has engines' processes of its own."""
    if not isinstance(config, Config):
        return False
    return config.rollout.engine == "sglang" and not config.rollout.url


def _device(config: AnyConfig, machine: Machine, *, ranks: int, on_cuda: bool) -> Iterator[Line]:
    if not on_cuda:
        yield Line(state="ok", what="device", found=f"cpu, {machine.num_cpus} cores")
        if ranks > machine.num_cpus:
            yield Line(
                state="note", what="cores", found=f"{machine.num_cpus} for {ranks} ranks",
                remedy="it works, slowly; set OMP_NUM_THREADS=1",
            )  # fmt: skip
        return
    names = ", ".join(sorted({gpu.name for gpu in machine.gpus})) or "none"
    yield _judge(
        len(machine.gpus) >= ranks, "GPUs", f"{len(machine.gpus)} ({names}) for {ranks} ranks",
        "start as many ranks on this node as there are GPUs; if nvidia-smi shows more, look at "
        "CUDA_VISIBLE_DEVICES and at the container's device flags (docker: --gpus all)",
    )  # fmt: skip
    yield _judge(
        bool(machine.driver), "driver", machine.driver or "none",
        "install NVIDIA's driver on the host; a container brings CUDA, but never the driver",
    )  # fmt: skip
    yield _judge(
        bool(machine.cuda), "CUDA build of PyTorch", machine.cuda or "none",
        "this PyTorch is a CPU build: use the image of the Dockerfile, or PyTorch's CUDA index",
    )  # fmt: skip
    yield _judge(bool(machine.nccl), "NCCL", machine.nccl or "none", "it comes with PyTorch's CUDA")
    if config.model.fp8 != "none" and machine.gpus:
        oldest = min(machine.gpus, key=lambda gpu: float(gpu.capability))
        yield _judge(
            float(oldest.capability) >= 8.9, "fp8 products", f"compute {oldest.capability}",
            "model.fp8 needs Ada, Hopper or newer (8.9): set model.fp8=none",
        )  # fmt: skip


def _packages(config: AnyConfig, machine: Machine, *, on_cuda: bool) -> Iterator[Line]:
    found = machine.packages.get("megatron-core", "")
    yield _judge(
        found == TESTED_MEGATRON, "megatron-core", found or "none",
        f"pip install megatron-core=={TESTED_MEGATRON}: other versions are not tested",
    )  # fmt: skip
    for name, (remedy, will_do) in _wanted(config, on_cuda=on_cuda).items():
        version = machine.packages.get(name, "")
        yield _judge(bool(version) and will_do(version), name, version or "none", remedy)
    apex = machine.packages.get("apex", "")
    if apex and not machine.apex_is_nvidias:
        yield _judge(
            False, "apex", f"{apex}, which is not NVIDIA's",
            "pip uninstall apex: Megatron would take it for NVIDIA's (docs/gpu.md)",
        )  # fmt: skip
    elif on_cuda:
        yield Line(
            state="ok" if apex else "note", what="apex", found=apex or "none",
            remedy="" if apex else "optional: fused kernels; only from NVIDIA (docs/gpu.md)",
        )  # fmt: skip


def _wanted(config: AnyConfig, *, on_cuda: bool) -> dict[str, tuple[str, Callable[[str], bool]]]:
    """Packages beside Megatron: how to get one, and whether a version of it will do."""
    found: dict[str, tuple[str, Callable[[str], bool]]] = {}
    if isinstance(config, Config) and _starts_sglang(config):
        found["sglang"] = (
            f"bash launch/setup_venv.sh (CPU), or pip install -e .[gpu]: it must be "
            f"{TESTED_SGLANG}, other versions are not tested",
            lambda version: public(version) == TESTED_SGLANG,
        )
        if on_cuda:
            found["sglang-kernel"] = (
                f"pip install -e .[gpu]: it holds SGLang's CUDA kernels, and SGLang "
                f"{TESTED_SGLANG} asks for {SGLANG_KERNEL}",
                lambda version: public(version) == SGLANG_KERNEL,
            )
            if config.rollout.sleep:
                found["torch-memory-saver"] = (
                    "rollout.sleep needs it: pip install torch-memory-saver, or "
                    "rollout.sleep=false",
                    bool,
                )
    if on_cuda:
        found["transformer-engine"] = (
            f"docs/gpu.md says how; NVIDIA's PyTorch images have it; {RULE_OF_ENGINE}",
            fits,
        )
    if config.parallel.fsdp:
        found["einops"] = ("parallel.fsdp needs it: pip install einops", bool)
    return found


def _shared_memory(
    config: AnyConfig, machine: Machine, *, ranks: int, on_cuda: bool
) -> Iterator[Line]:
    # For an engine of our own two buckets a rank stay there on CPU; on CUDA NCCL takes some.
    buckets = 0
    if isinstance(config, Config) and _starts_sglang(config):
        buckets = 2 * config.rollout.sync_bucket_bytes
    per_rank = GIB // 2 if on_cuda else buckets
    needed = ranks * per_rank
    yield _judge(
        machine.shm_free_bytes >= needed, "shared memory",
        f"{gib(machine.shm_free_bytes)} free of {gib(machine.shm_bytes)}, {gib(needed)} needed",
        "a larger /dev/shm (docker: --shm-size=32g; Kubernetes: an emptyDir of medium Memory)"
        + (", or a smaller rollout.sync_bucket_bytes" if buckets else ""),
    )  # fmt: skip


def _open_files(machine: Machine) -> Iterator[Line]:
    soft, hard = machine.open_files_soft, machine.open_files_hard
    yield _judge(
        max(soft, hard) >= NEEDED_FILES, "open files", f"{soft} (hard limit {hard})",
        f"a run raises its own limit up to the hard one, which must be {NEEDED_FILES} or more: "
        "ulimit -Hn as root, or LimitNOFILE / --ulimit nofile of the service or container",
    )  # fmt: skip


def _room(config: AnyConfig, machine: Machine, *, ranks: int) -> Iterator[Line]:
    run_dir = Path(config.trainer.run_dir).absolute()
    nearest = next(p for p in (run_dir, *run_dir.parents) if p.exists())
    free = shutil.disk_usage(nearest).free
    try:
        state = checkpoint_bytes(config)
    except ModelError as error:
        yield Line(state="note", what="models", found=str(error), remedy="sizes are not known")
        yield Line(state="note", what="disk of run_dir", found=f"{gib(free)} free at {nearest}")
        return
    kept = config.checkpoint.keep + 1
    yield _judge(
        free >= kept * state, "disk of run_dir",
        f"{gib(free)} free at {nearest}, {gib(kept * state)} needed ({kept} checkpoints of "
        f"{gib(state)})",
        "another trainer.run_dir, or a smaller checkpoint.keep",
    )  # fmt: skip
    needed = ranks * _ENGINE_BYTES if _starts_sglang(config) else 0
    yield _judge(
        machine.available_bytes >= needed, "host memory",
        f"{gib(machine.available_bytes)} of {gib(machine.memory_bytes)} can be taken, "
        f"{gib(needed)} needed for engines' processes",
        "fewer ranks on this node, or a larger limit of the job or container",
    )  # fmt: skip
    if config.checkpoint.async_save:
        yield Line(
            state="note", what="background saves",
            found=f"all nodes together copy up to {gib(state)} of state to host memory",
            remedy="where that is short, a save is written in line",
        )  # fmt: skip


def checkpoint_bytes(config: AnyConfig) -> int:
    """Of one checkpoint: for each trained weight itself, and Adam's three in float32.

    Of a model with adapters these alone are saved: an estimate, by their shapes without padding.

    Raises:
        ModelError: a model folder cannot be read.
    """
    total = 0
    for role, path, lora in _trained(config):
        spec = load_spec(path, trust_remote_code=config.model.trust_remote_code, files=False)
        if lora.rank:
            weights = _adapter_weights(spec, lora)
            weights += spec.hidden_size if role == "critic" else 0  # its head is trained too
        else:
            weights = sum(math.prod(shape) for shape in hf_names(spec).values())
        total += weights * ((2 if config.model.dtype == "bfloat16" else 4) + 12)
    return total


def _trained(config: AnyConfig) -> list[tuple[str, str, LoraSection]]:
    """Role, folder and adapters of each model that is trained."""
    if not isinstance(config, Config):
        return [("model", config.model.path, LoraSection())]
    return [
        (role, (config.critic.path if role == "critic" else "") or config.model.path, made.lora)
        for role, made in config.trained_roles.items()
    ]


def _adapter_weights(spec: ModelSpec, settings: LoraSection) -> int:
    """Of all adapters: rank x (inputs + outputs) of each layer that has one."""
    hidden, ffn = spec.hidden_size, spec.ffn_hidden_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    sides = {
        "linear_qkv": hidden + queries + 2 * keys,
        "linear_proj": queries + hidden,
        "linear_fc1": hidden + 2 * ffn,
        "linear_fc2": ffn + hidden,
    }
    wide = sum(sides[target] for target in settings.target_modules)
    return settings.rank * spec.num_layers * wide


def _ports(ranks: int) -> Iterator[Line]:
    taken = []
    for local_rank in range(ranks):
        try:
            reserve_ports(4, local_rank=local_rank).release()
        except UserError as error:
            taken.append(str(error))
    yield _judge(
        not taken, "free ports", "for every engine" if not taken else taken[0],
        "end what holds them (ss -ltnp), or wait until the kernel has released them",
    )  # fmt: skip


def _nodes(environment: Mapping[str, str]) -> Iterator[Line]:
    """On several nodes the first one's address is told, and never guessed."""
    nodes = environment.get("NNODES") or environment.get("SLURM_NNODES") or "1"
    if not nodes.isdigit() or int(nodes) < 2:
        return
    address = environment.get("MASTER_ADDR", "")
    remedy = (
        "set MASTER_ADDR to the first node's name or address as the other nodes reach it; a guess "
        "would make each node a run of its own"
    )
    if not address:
        yield _judge(False, "MASTER_ADDR", f"not set, and there are {nodes} nodes", remedy)
        return
    try:
        resolved = sorted({str(i[4][0]) for i in socket.getaddrinfo(address, None)})
    except OSError as error:
        yield _judge(False, "MASTER_ADDR", f"{address} cannot be resolved: {error}", remedy)
        return
    loops = all(ip.startswith("127.") or ip == "::1" for ip in resolved)
    yield _judge(not loops, "MASTER_ADDR", f"{address} is {', '.join(resolved)}", remedy)


def gib(num_bytes: int) -> str:
    """A size in words."""
    if num_bytes < 10 * GIB:
        return f"{num_bytes / 2**20:,.0f} MiB"
    return f"{num_bytes / GIB:,.0f} GiB"
