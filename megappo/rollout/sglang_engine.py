"""`RolloutEngine` on SGLang: generation, weight versions, memory.

The same requests with the same weights give bit-identical tokens and log-probs on CPU, in any run:
all requests of a call travel as one message, so the scheduler forms the same batches; it works
first come, first served, without overlap; the prefix cache starts empty after each push; and each
draw depends on the request's seed alone (`sglang_seeds`). On CUDA SGLang's deterministic mode
does the same with batch-invariant kernels.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from megappo.errors import ModelError
from megappo.rollout.device_memory import GIB, free_bytes, wait_until_released
from megappo.rollout.engine import (
    EngineDied,
    EngineRefused,
    GenerationRequest,
    OnFinished,
    SyncReport,
    check_length,
    tell_nobody,
)
from megappo.rollout.ports import PortReservation, reserve_ports
from megappo.rollout.sglang_answers import (
    FINISHED,
    body_of,
    completion_of,
    outputs_of,
    seed_probe,
)
from megappo.rollout.sglang_finish import overhearing
from megappo.rollout.sglang_process import SGLangProcess
from megappo.rollout.sglang_settings import (
    INITIAL_WEIGHT_VERSION,
    EngineSettings,
    arguments_of,
    check_installation,
    environment_of,
)
from megappo.rollout.staging import Staging
from megappo.rollout.sync_check import SyncWitness
from megappo.rollout.weight_update import push_weights
from megappo.types import Completion

__all__ = ["EngineSettings", "SGLangEngine"]

_MEMORY_TAGS = ("weights", "kv_cache")
_FLUSH_TIMEOUT_S = 60.0
_FLUSH_POLL_S = 0.01
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
        self._num_aborted = 0
        self._staging = Staging()
        self._verified = False
        self._cache_is_new = False
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
    def num_aborted(self) -> int:
        """Responses that SGLang broke off and that were sampled again, since the start."""
        return self._num_aborted

    @property
    def pids(self) -> list[int]:
        """Process ids of the engine's own children."""
        return self._process.pids

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_finished: OnFinished = tell_nobody
    ) -> list[Completion]:
        """One completion a request, in the order of the requests.

        Raises:
            UserError: a prompt and its response do not fit the context.
            EngineDied: the engine's processes are gone.
            EngineRefused: the engine broke a promise: wrong weights, no token, a response that it
                breaks off again and again.
            RuntimeError: the engine sleeps, or waits for a push.
        """
        if not requests:
            return []
        self._require_weights()
        for number, request in enumerate(requests):
            check_length(number, request, self.settings.context_length)
        places = {id(request): number for number, request in enumerate(requests)}

        def heard(request: GenerationRequest, output: dict[str, Any]) -> None:
            if output["meta_info"]["finish_reason"]["type"] in FINISHED:
                on_finished(places[id(request)], self._completion(output))

        def send(batch: Sequence[GenerationRequest]) -> list[dict[str, Any]]:
            with overhearing(
                self._process.manager, lambda number, output: heard(batch[number], output)
            ):
                return self._send(batch)

        outputs, num_aborted = outputs_of(requests, send)
        self._num_aborted += num_aborted
        completions = [self._completion(output) for output in outputs]
        self._require_new_cache(outputs[0])
        return completions

    def update_weights(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        *,
        expected_names: Collection[str],
        version: int,
    ) -> SyncReport:
        """Replaces all weights, compares some as `verify_sync` says, and forgets cached prefixes.

        After any exception the weights are half old, half new: `generate` refuses until a complete
        push has followed.

        Args:
            named_tensors: Hugging Face names and tensors, on the CPU or the engine's device.
            expected_names: the names that must come, each exactly once; a mapping to shapes has
                those compared too.
            version: of these weights; completions are checked against it.

        Raises:
            ValueError: a name is unknown, missing or comes twice, or its tensor is not finite or
                has another shape or dtype.
            EngineRefused: SGLang refused a part, or holds something else than what was sent.
            EngineDied: the engine's processes are gone.
            RuntimeError: the engine sleeps.
        """
        if "weights" in self._asleep:
            raise RuntimeError("weights were pushed while the engine sleeps: call wake() first")
        verify_sync = self.settings.verify_sync
        verify = verify_sync == "always" or (verify_sync == "first" and not self._verified)
        self._unusable = f"a push of weight version {version} did not complete"
        report = push_weights(
            self._process,
            named_tensors,
            expected_names=expected_names,
            dtype=self.settings.torch_dtype,
            version=version,
            bucket_bytes=self.settings.bucket_bytes,
            tp_size=self.settings.tp_size,
            staging=self._staging,
            witness=SyncWitness(expected_names) if verify else None,
            device=self.settings.device,
            timeout_s=self.settings.timeout_s,
        )
        self._verified = self._verified or verify
        # Not before: weights and the trainer's copies of them may need the memory meanwhile.
        self._resume("kv_cache")
        self.flush()
        self._cache_is_new = True
        self._weight_version = version
        self._unusable = None
        return report

    def flush(self) -> None:
        """Forgets cached prefixes.

        Raises:
            EngineRefused: SGLang would not, because requests still run.
        """
        deadline = time.monotonic() + _FLUSH_TIMEOUT_S
        while True:
            # Not with SGLang's own time-out: its scheduler dozes up to a second before it looks
            # again whether it is idle, and each request wakes it.
            result = self._process.call(
                self._process.manager.flush_cache(),
                timeout_s=self.settings.timeout_s,
                what="flushing its cache",
            )
            if result.success:
                return
            if time.monotonic() > deadline:
                raise EngineRefused(
                    f"SGLang did not flush its cache within {_FLUSH_TIMEOUT_S:g} s: requests still "
                    f"run; its log is {self.settings.log_file}"
                )
            time.sleep(_FLUSH_POLL_S)

    def memory_bytes(self) -> int:
        """Device memory of weights and cache in one process, by SGLang's own account."""
        states = self._process.call(
            self._process.manager.get_internal_state(),
            timeout_s=self.settings.timeout_s,
            what="reporting its memory",
        )
        usage = states[0]["memory_usage"]
        return int((usage["weight"] + usage["kvcache"]) * GIB)

    def sleep(self) -> int:
        """Gives the device memory of weights and cache back (nothing to give on CPU).

        Returns:
            The bytes that came free on the device; 0 without `memory_saver` or on CPU.

        Raises:
            EngineRefused: the memory did not come free within `release_timeout_s`.
        """
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        tags = [tag for tag in _MEMORY_TAGS if tag not in self._asleep]
        if not tags:
            return 0
        saves = self.settings.device == "cuda" and self.settings.memory_saver
        # SGLang answers before its scheduler is idle, and a release while it is not ends it. A
        # flush waits for that.
        self.flush()
        expected, free = (self.memory_bytes(), self._free_bytes()) if saves else (0, 0)
        self._process.call(
            self._process.manager.release_memory_occupation(
                ReleaseMemoryOccupationReqInput(tags=tags)
            ),
            timeout_s=self.settings.timeout_s,
            what="releasing its memory",
        )
        self._asleep.update(tags)
        self._unusable = "the engine slept, and its weights were not pushed again"
        if not saves:
            return 0
        return wait_until_released(
            self._free_bytes,
            before=free,
            expected=expected,
            timeout_s=self.settings.release_timeout_s,
        )

    def wake(self) -> None:
        """Takes the weights' memory again; they are garbage until the next `update_weights`.

        That takes the cache's memory too.
        """
        self._resume("weights")

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

    def _resume(self, tag: str) -> None:
        """Takes memory again that `sleep` gave back; nothing if it did not."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        if tag not in self._asleep:
            return
        self._process.call(
            self._process.manager.resume_memory_occupation(
                ResumeMemoryOccupationReqInput(tags=[tag])
            ),
            timeout_s=self.settings.timeout_s,
            what=f"resuming its memory ({tag})",
        )
        self._asleep.remove(tag)

    def _free_bytes(self) -> int:
        return free_bytes(self.settings.base_gpu_id)

    def _require_weights(self) -> None:
        if "weights" in self._asleep:
            raise RuntimeError("the engine sleeps: call wake() and update_weights() first")
        if self._unusable is not None:
            raise RuntimeError(f"{self._unusable}: call update_weights() before generate()")

    def _send(self, requests: Sequence[GenerationRequest]) -> list[dict[str, Any]]:
        """Sends all requests as one batch; SGLang sends a batch of ids as one message."""
        from fastapi import HTTPException
        from sglang.srt.managers.io_struct import GenerateReqInput

        batch = GenerateReqInput(**body_of(requests))
        try:
            outputs: list[dict[str, Any]] = self._process.call(
                anext(self._process.manager.generate_request(batch, None)),
                timeout_s=self.settings.timeout_s,
                what=f"generating {len(requests)} responses",
            )
        except (ValueError, HTTPException) as error:  # how SGLang's manager reports a failure
            raise EngineRefused(f"SGLang refused to generate: {error}") from error
        return outputs

    def _completion(self, output: dict[str, Any]) -> Completion:
        return completion_of(
            output,
            version=str(self._weight_version),
            tokenizer=self._process.manager.tokenizer,
        )

    def _require_new_cache(self, first: dict[str, Any]) -> None:
        """The first response after a push must have computed its whole prompt itself."""
        cached = first["meta_info"]["cached_tokens"]
        if self._cache_is_new and cached:
            self._unusable = "SGLang's cache outlived a push"
            raise EngineRefused(
                f"the first response after weight version {self._weight_version} took {cached} "
                "tokens from the prefix cache, which holds results of older weights"
            )
        self._cache_is_new = False

    def _check_seeds(self) -> None:
        """Draws at a near-uniform temperature: equal seeds must agree, different ones differ.

        SGLang ignores seeds, and hooks that could not be installed, without a word.
        """
        first, same, other = (
            completion.token_ids
            for completion in self.generate(seed_probe(self.settings.context_length))
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
