"""`RolloutEngine` on SGLang: settings, generation, weight versions, memory.

The same requests with the same weights give bit-identical tokens and log-probs on CPU, in any run:
all requests of a call travel as one message, so the scheduler forms the same batches; it works
first come, first served, without overlap; the prefix cache starts empty after each push; and each
draw depends on the request's seed alone (`sglang_seeds`). On CUDA SGLang's deterministic mode
does the same with batch-invariant kernels.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from megappo.errors import ModelError, UserError
from megappo.rollout.engine import EngineDied, GenerationRequest, SyncReport
from megappo.rollout.ports import DEFAULT_BASE, PortReservation, reserve_ports
from megappo.rollout.sampling import SamplingSettings
from megappo.rollout.sglang_process import SGLangProcess
from megappo.rollout.weight_update import push_weights
from megappo.types import Completion

INITIAL_WEIGHT_VERSION = 0
"""Version of the weights that the engine reads from the model folder."""

_DEVICES = ("cpu", "cuda")
_DTYPES = ("float32", "bfloat16", "float16")
_MEMORY_TAGS = ("weights", "kv_cache")
_CONTEXT_RESERVE = 8
"""Tokens that SGLang keeps free at the end of the context and of the cache."""
_CPU_CACHE_TOKENS = 65536
_FLUSH_TIMEOUT_S = 60.0
_CUDA_EXIT_TIMEOUT_S = 15.0
_START_ATTEMPTS = 3
_PORT_TAKEN = "EADDRINUSE"
_PLUGINS = {"sglang.srt.platforms": "megappo_cpu", "sglang.srt.plugins": "megappo_seeds"}


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
    memory_saver: bool = True
    """Whether `sleep` can give device memory back (CUDA)."""
    num_threads: int = 1
    """CPU threads of each of the engine's processes."""
    bucket_bytes: int = 256 << 20
    """Weights that are pushed at a time; the staging buffer has this size."""
    trust_remote_code: bool = False
    """Run Python code from the model folder."""
    start_timeout_s: float = 600.0
    """For the start, reading the weights included."""
    timeout_s: float = 3600.0
    """For one call: generation or weight push."""

    def __post_init__(self) -> None:
        if self.device not in _DEVICES:
            raise UserError(f"the engine's device must be one of {_DEVICES}, not {self.device!r}")
        if self.dtype not in _DTYPES:
            raise UserError(f"the engine's dtype must be one of {_DTYPES}, not {self.dtype!r}")
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
    def cache_tokens(self) -> int | None:
        """Tokens that the cache holds; None where SGLang measures what fits."""
        if self.max_total_tokens is not None or self.device != "cpu":
            return self.max_total_tokens
        wanted = self.max_running_requests * self.context_length
        return max(self.context_length, min(wanted, _CPU_CACHE_TOKENS))


class SGLangEngine:
    """A `RolloutEngine` whose model runs in SGLang processes of this rank."""

    def __init__(self, settings: EngineSettings) -> None:
        """Starts the engine with the folder's weights, which get version 0.

        Raises:
            ModelError: the model folder is missing.
            UserError: the installation or the ports do not allow a start.
            EngineDied: SGLang did not come up.
        """
        if not (settings.model_path / "config.json").exists():
            raise ModelError(f"{settings.model_path} is no model folder: it has no config.json")
        _check_installation(settings.device)
        self.settings = settings
        self._process, self._ports = _start(settings)
        self._weight_version = INITIAL_WEIGHT_VERSION
        self._asleep: set[str] = set()
        self._unusable: str | None = None
        try:
            self._check_seeds()
        except BaseException:
            self.shutdown()
            raise

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next response is sampled from."""
        return self._weight_version

    @property
    def pids(self) -> list[int]:
        """Process ids of the engine's own children."""
        return self._process.pids

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """One completion a request, in the order of the requests.

        Raises:
            UserError: a prompt and its response do not fit the context.
            EngineDied: the engine's processes are gone.
            RuntimeError: the engine broke a promise: wrong weights, no token, an aborted response.
        """
        if not requests:
            return []
        self._require_weights()
        for number, request in enumerate(requests):
            self._check_length(number, request)
        outputs = self._send(requests)
        return [
            self._completion(output, request)
            for output, request in zip(outputs, requests, strict=True)
        ]

    def update_weights(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        *,
        expected_names: Collection[str],
        version: int,
    ) -> SyncReport:
        """Replaces all weights and forgets cached prefixes.

        After any exception the weights are half old, half new: `generate` refuses until a complete
        push has followed.

        Args:
            named_tensors: Hugging Face names and tensors, on the CPU or the engine's device.
            expected_names: the names that must come, each exactly once.
            version: of these weights; completions are checked against it.

        Raises:
            ValueError: a name is unknown, missing or comes twice.
            RuntimeError: SGLang refused a part.
            EngineDied: the engine's processes are gone.
        """
        if "weights" in self._asleep:
            raise RuntimeError("weights were pushed while the engine sleeps: call wake() first")
        self._unusable = f"a push of weight version {version} did not complete"
        report = push_weights(
            self._process,
            named_tensors,
            expected_names=expected_names,
            version=version,
            bucket_bytes=self.settings.bucket_bytes,
            tp_size=self.settings.tp_size,
            timeout_s=self.settings.timeout_s,
        )
        self.flush()
        self._weight_version = version
        self._unusable = None
        return report

    def flush(self) -> None:
        """Forgets cached prefixes.

        Raises:
            RuntimeError: SGLang refused, because requests still run.
        """
        result = self._process.call(
            self._process.manager.flush_cache(timeout_s=_FLUSH_TIMEOUT_S),
            timeout_s=self.settings.timeout_s,
            what="flushing its cache",
        )
        if not result.success:
            raise RuntimeError(
                f"SGLang did not flush its cache within {_FLUSH_TIMEOUT_S:g} s: {result.message}"
            )

    def sleep(self) -> None:
        """Gives the device memory of weights and cache back (nothing to give on CPU)."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        tags = [tag for tag in _MEMORY_TAGS if tag not in self._asleep]
        if not tags:
            return
        # SGLang answers before its scheduler is idle, and a release while it is not ends it. A
        # flush waits for that.
        self.flush()
        self._process.call(
            self._process.manager.release_memory_occupation(
                ReleaseMemoryOccupationReqInput(tags=tags)
            ),
            timeout_s=self.settings.timeout_s,
            what="releasing its memory",
        )
        self._asleep.update(tags)
        self._unusable = "the engine slept, and its weights were not pushed again"

    def wake(self) -> None:
        """Takes the memory again; the weights are garbage until the next `update_weights`."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        tags = [tag for tag in _MEMORY_TAGS if tag in self._asleep]
        if not tags:
            return
        self._process.call(
            self._process.manager.resume_memory_occupation(
                ResumeMemoryOccupationReqInput(tags=tags)
            ),
            timeout_s=self.settings.timeout_s,
            what="resuming its memory",
        )
        self._asleep.clear()

    def shutdown(self) -> None:
        """Ends the engine's processes, and those alone. May be called twice."""
        self._process.close()
        self._ports.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _require_weights(self) -> None:
        if self._asleep:
            raise RuntimeError("the engine sleeps: call wake() and update_weights() first")
        if self._unusable is not None:
            raise RuntimeError(f"{self._unusable}: call update_weights() before generate()")

    def _check_length(self, number: int, request: GenerationRequest) -> None:
        prompt, response = len(request.token_ids), request.sampling.max_new_tokens
        if prompt == 0:
            raise UserError(f"request {number} has an empty prompt: give at least one token")
        if prompt + response > self.settings.context_length:
            raise UserError(
                f"request {number}: {prompt} prompt tokens and max_new_tokens {response} exceed "
                f"context_length {self.settings.context_length}: raise it, or filter long prompts"
            )

    def _send(self, requests: Sequence[GenerationRequest]) -> list[dict[str, Any]]:
        """Sends all requests as one batch; SGLang sends a batch of ids as one message."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        batch = GenerateReqInput(
            input_ids=[list(request.token_ids) for request in requests],
            sampling_params=[r.sampling.to_sglang(seed=r.seed) for r in requests],
            return_logprob=True,
        )
        outputs: list[dict[str, Any]] = self._process.call(
            anext(self._process.manager.generate_request(batch, None)),
            timeout_s=self.settings.timeout_s,
            what=f"generating {len(requests)} responses",
        )
        return outputs

    def _completion(self, output: dict[str, Any], request: GenerationRequest) -> Completion:
        meta = output["meta_info"]
        reason = meta["finish_reason"]
        if reason["type"] not in ("stop", "length"):
            raise RuntimeError(f"SGLang did not finish a response: {reason}")
        if meta["weight_version"] != str(self._weight_version):
            raise RuntimeError(
                f"a response comes from weight version {meta['weight_version']}, and version "
                f"{self._weight_version} was pushed last"
            )
        ids = tuple(output["output_ids"])
        if not ids:
            raise RuntimeError(f"SGLang returned a response without tokens: {reason}")
        return Completion(
            token_ids=ids,
            log_probs=tuple(entry[0] for entry in meta["output_token_logprobs"]),
            finish_reason=reason["type"],
            text=self._text(ids, matched=reason.get("matched")),
        )

    def _text(self, ids: tuple[int, ...], *, matched: int | str | None) -> str:
        """The response for people and rewards: without what ended it, without special tokens."""
        shown = ids[:-1] if isinstance(matched, int) else ids
        text: str = self._process.manager.tokenizer.decode(shown, skip_special_tokens=True)
        return text.partition(matched)[0] if isinstance(matched, str) else text

    def _check_seeds(self) -> None:
        """Draws at a near-uniform temperature: equal seeds must agree, different ones differ.

        SGLang ignores seeds, and hooks that could not be installed, without a word.
        """
        length = min(8, self.settings.context_length - 1)
        sampling = SamplingSettings(max_new_tokens=length, temperature=1e4, ignore_eos=True)
        first, same, other = (
            completion.token_ids
            for completion in self.generate(
                [
                    GenerationRequest(token_ids=(0,), seed=seed, sampling=sampling)
                    for seed in (1, 1, 2)
                ]
            )
        )
        if first != same or first == other:
            raise RuntimeError(
                f"SGLang does not honour seeds: seed 1 drew {first} and {same}, seed 2 {other}; "
                f"look in {self.settings.log_file} for hooks that failed"
            )
        self.flush()


def _start(settings: EngineSettings) -> tuple[SGLangProcess, PortReservation]:
    """A running engine and its ports; tries again where a foreign program took the port."""
    for attempt in range(1, _START_ATTEMPTS + 1):
        ports = reserve_ports(1, local_rank=settings.local_rank, base=settings.port_base)
        try:
            process = SGLangProcess(
                _arguments(settings, nccl_port=ports.ports[0]),
                log_file=settings.log_file,
                environment=_environment(settings),
                start_timeout_s=settings.start_timeout_s,
                # A killed process may leave memory on a GPU behind for a while; on CPU it cannot.
                exit_timeout_s=_CUDA_EXIT_TIMEOUT_S if settings.device == "cuda" else 0.0,
            )
        except EngineDied as error:
            ports.release()
            if _PORT_TAKEN not in str(error) or attempt == _START_ATTEMPTS:
                raise
        except BaseException:
            ports.release()
            raise
        else:
            return process, ports
    raise AssertionError("the last attempt returns or raises")


def _check_installation(device: str) -> None:
    """Raises UserError if SGLang would start and then run without our plug-ins."""
    if device == "cuda":
        if not torch.cuda.is_available():
            raise UserError("rollout on cuda needs a CUDA device, and none is visible: use cpu")
        return
    if torch.cuda.is_available():
        raise UserError(
            "rollout on cpu needs a process that sees no CUDA device: set CUDA_VISIBLE_DEVICES="
        )
    for group, name in _PLUGINS.items():
        if name not in {entry.name for entry in entry_points(group=group)}:
            raise UserError(
                f"SGLang finds no plug-in {name!r} in {group!r}: install megappo with "
                "`pip install --no-deps -e .`, so that its entry points are known"
            )


def _arguments(settings: EngineSettings, *, nccl_port: int) -> dict[str, Any]:
    """Arguments of `sglang.Engine`."""
    arguments: dict[str, Any] = {
        "model_path": str(settings.model_path),
        "device": settings.device,
        "dtype": settings.dtype,
        "tp_size": settings.tp_size,
        "base_gpu_id": settings.base_gpu_id,
        "nccl_port": nccl_port,
        "context_length": settings.context_length + _CONTEXT_RESERVE,
        "max_running_requests": settings.max_running_requests,
        "weight_version": str(INITIAL_WEIGHT_VERSION),
        "random_seed": 0,
        "schedule_policy": "fcfs",
        "disable_overlap_schedule": True,
        "disable_radix_cache": not settings.prefix_cache,
        "skip_server_warmup": True,
        "trust_remote_code": settings.trust_remote_code,
        "watchdog_timeout": settings.timeout_s,
        "log_level": "info",
        "decode_log_interval": 1000,
    }
    if settings.cache_tokens is not None:
        arguments["max_total_tokens"] = settings.cache_tokens + _CONTEXT_RESERVE
    if settings.mem_fraction_static is not None:
        arguments["mem_fraction_static"] = settings.mem_fraction_static
    if settings.device == "cpu":
        arguments["attention_backend"] = "torch_native"
    else:
        arguments["enable_deterministic_inference"] = True
        arguments["enable_memory_saver"] = settings.memory_saver
    return arguments


def _environment(settings: EngineSettings) -> dict[str, str]:
    """Variables of the engine's processes."""
    environment = {
        "OMP_NUM_THREADS": str(settings.num_threads),
        # The reserve above may pass the model's limit; `_check_length` keeps requests below it.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if settings.device == "cpu" and settings.tp_size > 1:
        cores = sorted(os.sched_getaffinity(0))
        ranks = range(settings.tp_size)
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            str(cores[rank % len(cores)]) for rank in ranks
        )
    return environment
