"""`RolloutEngine` on SGLang: generation, weight versions, memory.

The same requests with the same weights give bit-identical tokens and log-probs on CPU, in any run:
all requests of a call travel as one message, so the scheduler forms the same batches; it works
first come, first served, without overlap; the prefix cache starts empty after each push; and each
draw depends on the request's seed alone (`sglang_seeds`). On CUDA SGLang's deterministic mode
does the same with batch-invariant kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from megappo.errors import ModelError, UserError
from megappo.rollout.engine import EngineDied, GenerationRequest, SyncReport, response_text
from megappo.rollout.ports import PortReservation, reserve_ports
from megappo.rollout.sampling import SamplingSettings
from megappo.rollout.sglang_process import SGLangProcess
from megappo.rollout.sglang_settings import (
    INITIAL_WEIGHT_VERSION,
    EngineSettings,
    arguments_of,
    check_installation,
    environment_of,
)
from megappo.rollout.weight_update import push_weights
from megappo.types import Completion

__all__ = ["EngineSettings", "SGLangEngine"]

_MEMORY_TAGS = ("weights", "kv_cache")
_FLUSH_TIMEOUT_S = 60.0
_CUDA_EXIT_TIMEOUT_S = 15.0
_START_ATTEMPTS = 3
_PORT_TAKEN = "EADDRINUSE"


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
        check_installation(settings.device)
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
            text=response_text(self._process.manager.tokenizer, ids, matched=reason.get("matched")),
        )

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
                arguments_of(settings, nccl_port=ports.ports[0]),
                log_file=settings.log_file,
                environment=environment_of(settings),
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
