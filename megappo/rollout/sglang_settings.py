"""How SGLang runs on a rank: the settings, and SGLang's own arguments that follow from them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

import torch

from megappo.errors import UserError
from megappo.rollout.ports import DEFAULT_BASE

INITIAL_WEIGHT_VERSION = 0
"""Version of the weights that the engine reads from the model folder."""

_DEVICES = ("cpu", "cuda")
DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip
_PLUGINS = {"sglang.srt.platforms": "megappo_cpu", "sglang.srt.plugins": "megappo_seeds"}
CONTEXT_RESERVE = 8
"""Tokens that SGLang keeps free at the end of the context and of the cache."""
_CPU_CACHE_TOKENS = 65536


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How to run SGLang on this rank."""

    model_path: Path
    """Hugging Face folder: weights to start from, tokenizer."""
    log_file: Path
    """All output of the engine; one file a rank."""
    context_length: int
    """Most tokens of one prompt and its response together."""
    device: str = "cuda"
    """`cuda` or `cpu`."""
    dtype: str = "bfloat16"
    """Of weights and cache: float32, bfloat16 or float16."""
    tp_size: int = 1
    """Devices over which SGLang splits the model."""
    base_gpu_id: int = 0
    """First device of this engine among those that are visible."""
    local_rank: int = 0
    """Number of this rank on its host; gives the engine ports of its own."""
    port_base: int = DEFAULT_BASE
    """First port of local rank 0."""
    max_running_requests: int = 256
    """Responses that are generated at once; more wait."""
    max_total_tokens: int | None = None
    """Tokens in the cache. None: what fits (CUDA), or all running requests at full length, at most
    65536 (CPU)."""
    mem_fraction_static: float | None = None
    """Share of device memory for weights and cache (CUDA). None: SGLang decides."""
    prefix_cache: bool = False
    """Share the computation of equal prompt beginnings. Worth it for long prompts; short ones are
    faster without."""
    memory_saver: bool = False
    """Whether `sleep` can give device memory back; CUDA graphs and NCCL keep theirs."""
    num_threads: int = 1
    """CPU threads of each of the engine's processes."""
    bucket_bytes: int = 256 << 20
    """Weights that are pushed at a time; there is memory for two such buckets."""
    verify_sync: Literal["never", "first", "always"] = "first"
    """After which pushes chosen weights are read back and compared."""
    trust_remote_code: bool = False
    """Run Python code from the model folder."""
    start_timeout_s: float = 600.0
    """For the start, reading the weights included."""
    timeout_s: float = 3600.0
    """Longest silence of an engine that is to generate or to load weights."""
    release_timeout_s: float = 60.0
    """For the device memory to be free after `sleep` (CUDA)."""

    def __post_init__(self) -> None:
        if self.device not in _DEVICES:
            raise UserError(f"the engine's device must be one of {_DEVICES}, not {self.device!r}")
        if self.dtype not in DTYPES:
            raise UserError(
                f"the engine's dtype must be one of {tuple(DTYPES)}, not {self.dtype!r}"
            )
        counts = ("context_length", "tp_size", "max_running_requests", "num_threads")
        for name in (*counts, "bucket_bytes"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.cache_tokens is not None and self.cache_tokens < self.context_length:
            raise UserError(
                f"max_total_tokens ({self.cache_tokens}) must hold one request of context_length "
                f"({self.context_length}) tokens: raise max_total_tokens or lower context_length"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of weights and cache."""
        return DTYPES[self.dtype]

    @property
    def cache_tokens(self) -> int | None:
        """Tokens that the cache holds; None where SGLang measures what fits."""
        if self.max_total_tokens is not None or self.device != "cpu":
            return self.max_total_tokens
        wanted = self.max_running_requests * self.context_length
        return max(self.context_length, min(wanted, _CPU_CACHE_TOKENS))


def check_installation(device: str) -> None:
    """Raises UserError if SGLang would start and then run without our plug-ins."""
    if device == "cuda":
        if not torch.cuda.is_available():
            raise UserError("rollout on cuda needs a CUDA device, and none is visible: use cpu")
    elif torch.cuda.is_available():
        raise UserError(
            "rollout on cpu needs a process that sees no CUDA device: set CUDA_VISIBLE_DEVICES="
        )
    for group, name in _PLUGINS.items():
        if device == "cuda" and group == "sglang.srt.platforms":
            continue  # SGLang's own
        if name not in {entry.name for entry in entry_points(group=group)}:
            raise UserError(
                f"SGLang finds no plug-in {name!r} in {group!r}: install megappo with "
                "`pip install --no-deps -e .`, so that its entry points are known"
            )


def arguments_of(settings: EngineSettings, *, nccl_port: int) -> dict[str, Any]:
    """Arguments of `sglang.Engine`."""
    arguments: dict[str, Any] = {
        "model_path": str(settings.model_path),
        "device": settings.device,
        "dtype": settings.dtype,
        "tp_size": settings.tp_size,
        "base_gpu_id": settings.base_gpu_id,
        "nccl_port": nccl_port,
        "context_length": settings.context_length + CONTEXT_RESERVE,
        "max_running_requests": settings.max_running_requests,
        "weight_version": str(INITIAL_WEIGHT_VERSION),
        "random_seed": 0,
        "schedule_policy": "fcfs",
        "disable_overlap_schedule": True,
        # Without it the scheduler spins while the trainer works, on a core that the trainer needs.
        "sleep_on_idle": True,
        "disable_radix_cache": not settings.prefix_cache,
        "skip_server_warmup": True,
        "trust_remote_code": settings.trust_remote_code,
        "watchdog_timeout": settings.timeout_s,
        "log_level": "info",
        "decode_log_interval": 1000,
    }
    if settings.cache_tokens is not None:
        arguments["max_total_tokens"] = settings.cache_tokens + CONTEXT_RESERVE
    if settings.mem_fraction_static is not None:
        arguments["mem_fraction_static"] = settings.mem_fraction_static
    if settings.device == "cpu":
        arguments["attention_backend"] = "torch_native"
    else:
        arguments["enable_deterministic_inference"] = True
        arguments["enable_memory_saver"] = settings.memory_saver
        # Fused with the others they would have names and shapes that the trainer does not know.
        arguments["disable_shared_experts_fusion"] = True
    return arguments


def environment_of(settings: EngineSettings) -> dict[str, str]:
    """Variables of the engine's processes."""
    environment = {
        "OMP_NUM_THREADS": str(settings.num_threads),
        # The reserve may pass the model's limit; `SGLangEngine.generate` keeps requests below it.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if settings.device == "cpu":
        # A split vocabulary's lookup would be compiled, which takes a C++ compiler, half a minute
        # and a path without spaces.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    if settings.device == "cpu" and settings.tp_size > 1:
        cores = sorted(os.sched_getaffinity(0))
        ranks = range(settings.local_rank, settings.local_rank + settings.tp_size)
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            str(cores[rank % len(cores)]) for rank in ranks
        )
    return environment
