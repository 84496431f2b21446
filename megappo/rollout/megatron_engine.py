"""`RolloutEngine` on the actor's own Megatron model: for debugging, and as an oracle for SGLang.

It generates with the very parameters that are trained, in this process, so a difference between its
log-probs and SGLang's is SGLang's or the weight push's. All ranks of a TP group hold one engine
together: they bring their requests, run the same passes over all of them, draw the same tokens, and
each keeps its own answers.

Requests run in waves of `max_running_requests`; a wave ends with its longest response. The same
requests give bit-identical answers; in another batch kernels may round otherwise, log-probs then
differ by about 1e-6 and a draw that lies as near to a border can change. Left out: pipeline,
context and expert parallelism, time-outs, and a mixture of waves; it is not built for speed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from megappo.distributed.offload import Offloader, on_device
from megappo.distributed.parallel import ParallelContext, all_gather_objects
from megappo.models.generation import CachedDecoder
from megappo.rollout.draws import draw, uniform
from megappo.rollout.engine import (
    GenerationRequest,
    OnFinished,
    SyncReport,
    check_length,
    response_text,
    tell_nobody,
)
from megappo.types import Completion


@dataclass(kw_only=True)
class MegatronEngine:
    """A `RolloutEngine` without processes, weights or memory of its own."""

    chunk: Any
    """The actor's bare GPTModel, whole on this TP group."""
    vocab_size: int
    """Without padding."""
    memory: Offloader | None
    """Of the actor: its weights may lie in host memory between two calls."""
    context: ParallelContext
    tokenizer: Any
    end_tokens: frozenset[int]
    """End a response besides the request's own, unless it ignores them."""
    context_length: int
    """Most tokens of one prompt and its response together."""
    max_running_requests: int
    """Sequences of one wave: its cache has room for each at full length."""
    weight_version: int = field(default=0, init=False)
    """Of the last push; the weights are the actor's at every moment."""
    _asleep: bool = field(default=False, init=False)
    _ended: bool = field(default=False, init=False)

    @property
    def num_aborted(self) -> int:
        """None ever: what runs here runs to its end."""
        return 0

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_finished: OnFinished = tell_nobody
    ) -> list[Completion]:
        """One completion a request, in the order of the requests. Collective over TP.

        Raises:
            UserError: a prompt and its response do not fit the context.
            RuntimeError: the engine sleeps or has ended, or the model's logits are not finite.
        """
        self._require_awake()
        # Without pipeline and context parallelism a replica is a TP group.
        parts = all_gather_objects(list(requests), self.context.model_group)
        wanted: list[GenerationRequest] = [request for part in parts for request in part]
        for number, request in enumerate(wanted):
            check_length(number, request, self.context_length)
        running = [_Response(request=request) for request in wanted]
        first = sum(len(part) for part in parts[: self.context.model_rank])
        mine = running[first : first + len(requests)]
        for number, response in enumerate(mine):
            response.on_end = partial(self._tell, on_finished, number)
        # Neighbours share a pass over their prompts, so they should be of one length.
        in_order = sorted(running, key=lambda response: len(response.request.token_ids))
        with on_device(self.memory, "params"):
            for start in range(0, len(in_order), self.max_running_requests):
                self._run_wave(in_order[start : start + self.max_running_requests])
        return [response.completion(self.tokenizer) for response in mine]

    def update_weights(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        *,
        expected_names: Collection[str],
        version: int,
    ) -> SyncReport:
        """Counts the names and takes the version; the weights are here already.

        Args:
            named_tensors: as for any engine; read to the end, nothing is copied.
            expected_names: the names that must come, each exactly once.
            version: of these weights.

        Raises:
            ValueError: a name is unknown, missing or comes twice.
            RuntimeError: the engine sleeps or has ended.
        """
        self._require_awake()
        start = time.monotonic()
        found = Counter(name for name, _ in named_tensors)
        if found != Counter(set(expected_names)):
            wrong = {
                "unknown": sorted(found.keys() - set(expected_names)),
                "missing": sorted(set(expected_names) - found.keys()),
                "twice": sorted(name for name, count in found.items() if count > 1),
            }
            listed = "; ".join(f"{what}: {', '.join(n[:3])}" for what, n in wrong.items() if n)
            raise ValueError(
                f"the names that were pushed are not those of the checkpoint ({listed}): correct "
                "the model family's map of names"
            )
        self.weight_version = version
        return SyncReport(
            num_tensors=len(found),
            num_bytes=0,
            seconds=time.monotonic() - start,
            num_verified=0,
        )

    def flush(self) -> None:
        """Nothing to forget: a cache lives as long as its wave."""

    def sleep(self) -> int:
        """Nothing to give back: the weights are the actor's. Generates no more until `wake`."""
        self._asleep = True
        return 0

    def wake(self) -> None:
        """Generates again, with the actor's weights as they are now."""
        self._asleep = False

    def shutdown(self) -> None:
        """Generates no more; there is no process to end. May be called twice."""
        self._ended = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _tell(self, on_finished: OnFinished, number: int, response: _Response) -> None:
        on_finished(number, response.completion(self.tokenizer))

    def _require_awake(self) -> None:
        if self._ended:
            raise RuntimeError("the engine has ended: build another one")
        if self._asleep:
            raise RuntimeError("the engine sleeps: call wake() first")

    def _run_wave(self, wave: Sequence[_Response]) -> None:
        """Samples all responses of a wave to their ends. Collective over TP."""
        capacity = max(r.request.sampling.max_new_tokens + len(r.request.token_ids) for r in wave)
        with CachedDecoder(self.chunk, num_sequences=len(wave), capacity=capacity) as decoder:
            logits = decoder.prefill([response.request.token_ids for response in wave])
            active = list(range(len(wave)))
            while True:
                self._draw(logits, [wave[i] for i in active])
                active = [i for i in active if wave[i].finish_reason is None]
                if not active:
                    return
                logits = decoder.extend(active, [wave[i].token_ids[-1:] for i in active])

    def _draw(self, logits: Tensor, responses: Sequence[_Response]) -> None:
        tokens, log_probs = draw(
            logits[:, : self.vocab_size],
            [r.request.sampling for r in responses],
            [uniform(r.request.seed, len(r.token_ids)) for r in responses],
        )
        for response, token, log_prob in zip(responses, tokens, log_probs, strict=True):
            response.append(token, log_prob)
            response.check_end(self.tokenizer, self.end_tokens)


@dataclass(kw_only=True)
class _Response:
    """A response that is being sampled."""

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    matched: int | str | None = None
    """What ended it: a stop string or an end token."""
    on_end: Callable[[_Response], None] = field(default=lambda response: None)

    def append(self, token: int, log_prob: float) -> None:
        self.token_ids.append(token)
        self.log_probs.append(log_prob)

    def check_end(self, tokenizer: Any, end_tokens: frozenset[int]) -> None:
        """Ends the response where its last token does; in SGLang's order of precedence."""
        sampling, last = self.request.sampling, self.token_ids[-1]
        if sampling.stop:
            text = tokenizer.decode(self.token_ids)
            self.matched = next((stop for stop in sampling.stop if stop in text), None)
        if self.matched is None and not sampling.ignore_eos:
            ends = last in end_tokens or last in sampling.stop_token_ids
            self.matched = last if ends else None
        if self.matched is not None:
            self.finish_reason = "stop"
        elif len(self.token_ids) == sampling.max_new_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            self.on_end(self)

    def completion(self, tokenizer: Any) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            token_ids=tuple(self.token_ids),
            log_probs=tuple(self.log_probs),
            finish_reason=self.finish_reason,
            text=response_text(tokenizer, self.token_ids, matched=self.matched),
        )
