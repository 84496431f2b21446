"""`RolloutEngine` on an SGLang server that somebody else started: all over HTTP, weights aside.

Such a server cannot be started again from here. One that is gone is waited for; when it is healthy
again it has old weights, and gets the newest before it is asked for anything. Its answers carry the
version of their weights, which begins with a word of this engine's own: what a restarted server, or
one that another run has pushed to, answers is never taken for ours. A server serves one run at a
time: the later one has it, and the other ends.

Left out: `sleep`. A server's memory is not the trainer's.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

from torch import Tensor

from megappo.distributed.update_group import address_towards
from megappo.rollout.engine import (
    EngineDied,
    EngineGone,
    EngineRefused,
    GenerationRequest,
    OnFinished,
    SyncReport,
    check_length,
    tell_nobody,
)
from megappo.rollout.server_checks import ServerFacts, WantedModel, inspect_server
from megappo.rollout.server_client import ServerClient
from megappo.rollout.server_push import ServerLink
from megappo.rollout.sglang_answers import body_of, completion_of, outputs_of
from megappo.rollout.sglang_settings import DTYPES
from megappo.rollout.sync_check import SyncWitness
from megappo.types import Completion

_FLUSH_TIMEOUT_S = 60
_TIDY_TIMEOUT_S = 60.0
_PULSE_S = 5.0
"""Between questions to a server that generates whether it gets on."""
_PREFIX = "megappo-"
"""Begins the word of every run, which names its group; a version is the word, a dash, a number."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How to use one server."""

    url: str
    model: WantedModel
    tokenizer: Any
    """Of the model: text is decoded here."""
    api_key: str | None = field(default=None, repr=False)
    bucket_bytes: int = 256 << 20
    """Weights that are pushed at a time."""
    verify_sync: Literal["never", "first", "always"] = "first"
    """After which pushes chosen weights are read back and compared."""
    timeout_s: float = 3600.0
    """Of silence in a generation, and for any other call, such as a bucket of a push."""
    generate_timeout_s: float = 3600.0
    """For a whole generation, however well it gets on."""
    wait_s: float = 300.0
    """For the server to be healthy."""
    sync_address: str = ""
    """Of this host, as the server reaches it; empty: that of the way to the server."""


class SGLangServer:
    """A `RolloutEngine` whose model runs on a server."""

    def __init__(self, settings: ServerSettings) -> None:
        """Waits for the server, checks it, and joins it for weights; it needs a push first.

        Raises:
            EngineGone: it is not there, or serves something else.
            EngineFailure: it failed meanwhile.
        """
        self.settings = settings
        self._client = ServerClient(settings.url, api_key=settings.api_key)
        self.facts: ServerFacts = inspect_server(
            self._client, settings.model, wait_s=settings.wait_s
        )
        _log.info("using the server %s", self.facts.line())
        self._word = _PREFIX + secrets.token_hex(4)
        self._weight_version = 0
        self._num_aborted = 0
        self._verified = False
        self._unusable: str | None = "no weights were pushed to the server yet"
        self._link = ServerLink(self._client, name=self._word, timeout_s=settings.timeout_s)
        self._take_over()
        try:
            self._link.join(
                address=settings.sync_address
                or address_towards(self._client.host, self._client.port),
                tp_size=self.facts.tp_size,
                device=settings.model.device,
            )
        except BaseException:
            self.shutdown()
            raise

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next response is sampled from."""
        return self._weight_version

    @property
    def num_aborted(self) -> int:
        """Responses that the server broke off and that were sampled again, since the start."""
        return self._num_aborted

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_finished: OnFinished = tell_nobody
    ) -> list[Completion]:
        """One completion a request, in the order of the requests.

        They come as one answer, so `on_finished` is not told.

        Raises:
            UserError: a prompt and its response do not fit the context.
            EngineDied: the server is gone or does not answer.
            EngineRefused: it broke a promise: wrong weights, no token, a response that it breaks
                off again and again.
            EngineGone: another run has it.
            RuntimeError: it waits for a push.
        """
        if not requests:
            return []
        if self._unusable is not None:
            raise RuntimeError(f"{self._unusable}: call update_weights() before generate()")
        for number, request in enumerate(requests):
            check_length(number, request, self.settings.model.context_length)
        outputs, num_aborted = outputs_of(requests, self._send)
        self._num_aborted += num_aborted
        for output in outputs:
            self._require_no_other_run(output["meta_info"]["weight_version"])
        return [
            completion_of(
                output,
                version=self._version_word(self._weight_version),
                tokenizer=self.settings.tokenizer,
            )
            for output in outputs
        ]

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
            named_tensors: Hugging Face names and tensors.
            expected_names: the names that must come, each exactly once; a mapping to shapes has
                those compared too.
            version: of these weights; completions are checked against it.

        Raises:
            ValueError: a name is unknown, missing or comes twice, or its tensor is not finite.
            EngineRefused: the server refused a part, or holds something else than what was sent.
            EngineDied: the server is gone.
            EngineGone: another run has it.
        """
        settings = self.settings
        verify = settings.verify_sync == "always" or (
            settings.verify_sync == "first" and not self._verified
        )
        there = self._weight_version_there()
        self._require_no_other_run(there)
        if not there.startswith(self._word):
            raise EngineRefused(
                f"the server {self._client.url} was started again meanwhile (its weights have the "
                f"version {there!r})"
            )
        self._unusable = f"a push of weight version {version} did not complete"
        report = self._link.push(
            named_tensors,
            expected_names=expected_names,
            dtype=DTYPES[settings.model.dtype],
            version=self._version_word(version),
            bucket_bytes=settings.bucket_bytes,
            witness=SyncWitness(expected_names) if verify else None,
            num_kv_heads=settings.model.num_kv_heads,
            device=settings.model.device,
        )
        self._verified = self._verified or verify
        self.flush()
        self._weight_version = version
        self._unusable = None
        return report

    def flush(self) -> None:
        """Forgets cached prefixes.

        Raises:
            EngineRefused: the server would not, because requests of others still run.
        """
        self._client.post(
            f"/flush_cache?timeout={_FLUSH_TIMEOUT_S}",
            {},
            timeout_s=_FLUSH_TIMEOUT_S + self.settings.timeout_s,
            what="flushing its cache",
        )

    def sleep(self) -> int:
        """Nothing to give back: the memory is the server's."""
        return 0

    def wake(self) -> None:
        """Nothing to take again."""

    def shutdown(self) -> None:
        """Leaves the server, which stays up for the next run. May be called twice."""
        self._link.close()
        self._unusable = "the server was left"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _version_word(self, version: int) -> str:
        return f"{self._word}-{version}"

    def _require_no_other_run(self, version: str) -> None:
        """Raises EngineGone if these weights are another run's."""
        if version.startswith(_PREFIX) and not version.startswith(self._word):
            raise EngineGone(
                f"the server {self._client.url} is used by another run, which has pushed weight "
                f"version {version} to it: give each run servers of its own"
            )

    def _send(self, requests: Sequence[GenerationRequest]) -> list[dict[str, Any]]:
        settings, what = self.settings, f"generating {len(requests)} responses"
        posted = self._client.post_aside(
            "/generate", body_of(requests), timeout_s=settings.generate_timeout_s, what=what
        )
        heard = time.monotonic()
        while not wait([posted], timeout=_PULSE_S).done:
            if self._gets_on():
                heard = time.monotonic()
            elif time.monotonic() - heard > settings.timeout_s:
                raise EngineDied(
                    f"the server {self._client.url} sent no token within {settings.timeout_s:g} s "
                    f"while {what}"
                )
        outputs: list[dict[str, Any]] = posted.result()
        if len(outputs) != len(requests):
            raise EngineRefused(
                f"the server {self._client.url} gave {len(outputs)} answers to {len(requests)} "
                "requests"
            )
        return outputs

    def _take_over(self) -> None:
        """Makes the server this run's, and ends what the one before left on it if it died."""
        before = self._weight_version_there()
        if before.startswith(_PREFIX):
            group = before.rpartition("-")[0]
            self._tidy("/destroy_weights_update_group", {"group_name": group})
        self._tidy("/end_weight_update", {})
        self._link.set_version(self._version_word(self._weight_version))

    def _tidy(self, path: str, body: Any) -> None:
        try:
            self._client.post(path, body, timeout_s=_TIDY_TIMEOUT_S, what="tidying up")
        except EngineRefused as error:
            _log.debug("nothing to tidy: %s", error)

    def _gets_on(self) -> bool:
        """Whether the server's model has answered anything in the last seconds.

        SGLang asks it for a token if it has nothing else to do.

        Raises:
            EngineDied: the server is gone, or does not answer at all.
        """
        try:
            self._client.get(
                "/health_generate", timeout_s=self.settings.timeout_s, what="telling its health"
            )
        except EngineRefused:
            return False
        return True

    def _weight_version_there(self) -> str:
        """The version that the server's next answer would carry."""
        model = self._client.get(
            "/model_info", timeout_s=self.settings.timeout_s, what="telling its weight version"
        )
        return str(model["weight_version"])
