"""What the trainer asks of a rollout engine: `sglang_engine`, `sglang_server`, `megatron_engine`.

Token ids go in and come out: what the engine sampled is what is trained, no text is encoded twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from torch import Tensor

from megappo.errors import UserError
from megappo.rollout.sampling import SamplingSettings
from megappo.types import Completion


class EngineFailure(RuntimeError):  # noqa: N818, a state and not a mistake
    """Only a new engine helps; `recovery` starts one."""


class EngineDied(EngineFailure):
    """The engine's processes are gone or do not answer."""


class EngineRefused(EngineFailure):
    """The engine answers, but not what it was asked for, so nothing it says counts any more."""


class EngineGone(EngineFailure):
    """The engine cannot be had, and trying again would not help: a run ends with it."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One response to sample."""

    token_ids: tuple[int, ...]
    """The prompt, as `Prompt.token_ids`."""
    seed: int
    """From `sample_seed`: it alone decides the draw, not the batch around it."""
    sampling: SamplingSettings


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What one weight push moved."""

    num_tensors: int
    num_bytes: int
    seconds: float
    num_verified: int
    """Names whose content was read back and compared; 0 if this push was not verified."""


OnFinished = Callable[[int, Completion], None]
"""Told of a response as soon as it has ended, while others go on: the number of its request in the
call, and the response. From any thread, at most in passing, and perhaps not of every one: what an
engine cannot tell early is in its answer."""


def tell_nobody(number: int, completion: Completion) -> None:
    """An `OnFinished` for callers that can wait."""


class RolloutEngine(Protocol):
    """Generates with the newest weights it was given. All calls block.

    An engine may be shared by the ranks of a tensor-parallel group. `generate` is then collective
    over them: each brings its own requests, perhaps none, and gets its own completions.
    """

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next response is sampled from."""

    @property
    def num_aborted(self) -> int:
        """Responses that the engine broke off and that were sampled again, since its start."""

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_finished: OnFinished = tell_nobody
    ) -> list[Completion]:
        """One completion a request, in the order of the requests."""

    def update_weights(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        *,
        expected_names: Collection[str],
        version: int,
    ) -> SyncReport:
        """Replaces all weights; names are those of the Hugging Face checkpoint, each once.

        After a `wake` the cache takes its memory again too, once the weights are complete.
        """

    def flush(self) -> None:
        """Forgets cached prefixes."""

    def sleep(self) -> int:
        """Gives the device memory of weights and cache back; returns the bytes that came free."""

    def wake(self) -> None:
        """Takes the weights' memory again; they are garbage until the next `update_weights`."""

    def shutdown(self) -> None:
        """Ends the engine's processes, and those alone. May be called twice."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def check_length(number: int, request: GenerationRequest, context_length: int) -> None:
    """Refuses a request that an engine cannot hold.

    Args:
        number: of the request in its call, for the message.
        request: to be sampled.
        context_length: most tokens of a prompt and its response together.

    Raises:
        UserError: the prompt is empty, or prompt and response exceed the context.
    """
    prompt, response = len(request.token_ids), request.sampling.max_new_tokens
    if prompt == 0:
        raise UserError(f"request {number} has an empty prompt: give at least one token")
    if prompt + response > context_length:
        raise UserError(
            f"request {number}: {prompt} prompt tokens and max_new_tokens {response} exceed "
            f"context_length {context_length}: raise it, or filter long prompts"
        )


def response_text(tokenizer: Any, token_ids: Sequence[int], *, matched: int | str | None) -> str:
    """A response for people and rewards: without what ended it, without special tokens.

    Args:
        tokenizer: of the model.
        token_ids: of the response.
        matched: the end token or stop string that ended it; None at the length limit.
    """
    shown = token_ids[:-1] if isinstance(matched, int) else token_ids
    text: str = tokenizer.decode(shown, skip_special_tokens=True)
    return text.partition(matched)[0] if isinstance(matched, str) else text
