"""Reward from a server over HTTP.

A POST carries `{"samples": [{"data_source", "response", "ground_truth", "extra_info"}, ...]}`; the
answer is `{"scores": [number, ...]}`, as many and in that order; null is a failure of that sample.
An API key goes as a bearer token, and into no message.

No answer in time, a broken connection and the statuses 408, 429 and 5xx are tried again, after a
pause that doubles (a `Retry-After` in seconds is obeyed up to a minute). What fails still is an
error of the reward. Proxies of the environment are not used, redirections not followed.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import socket
import ssl
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from megappo.config.rewards import RemoteRewardSection
from megappo.errors import UserError
from megappo.rewards.base import GroupReward, RewardHungError, Sample

MAX_ANSWER_BYTES = 64 * 1024**2
MAX_PAUSE_S = 60.0
_SAID_CHARACTERS = 300
_TRY_AGAIN = frozenset({408, 429, *range(500, 600)})


def _left_s(deadline: float) -> float:
    """Raises TimeoutError if there is none."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


class _Timed(io.RawIOBase):
    """What comes from a socket until the deadline, be it in drops."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline: float) -> None:
        self._raw, self._sock, self._deadline = raw, sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left_s(self._deadline))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    """Headers and body of an answer, all before the deadline."""

    def __init__(self, sock: socket.socket, *args: Any, deadline: float, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.fp = io.BufferedReader(_Timed(self.fp.detach(), sock, deadline))


class RemoteReward(GroupReward):
    """Asks one server; threads ask at once, each over a connection of its own."""

    def __init__(self, settings: RemoteRewardSection) -> None:
        """Asks nothing yet.

        Raises:
            UserError: no URL, or the variable of the API key is not set.
        """
        if not settings.url:
            raise UserError("reward.remote.url is '': name the server of the reward 'remote'")
        key = os.environ.get(settings.api_key_env) if settings.api_key_env else None
        if settings.api_key_env and not key:
            raise UserError(
                f"reward.remote.api_key_env names {settings.api_key_env}, which is not set in the "
                "environment: set it to the key, or leave reward.remote.api_key_env out"
            )
        self.group_size = settings.batch_size
        self._settings = settings
        parts = urlsplit(settings.url)
        assert parts.hostname is not None, "the config's checks let no such URL pass"
        self._host, self._port = parts.hostname, parts.port
        self._is_secure = parts.scheme == "https"
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def score(self, samples: Sequence[Sample]) -> list[float | Exception]:
        """See `GroupReward`.

        Raises:
            RewardHungError: the last try had no answer in time.
            RuntimeError: the server is not there, refuses, or answers something else.
        """
        body = json.dumps({"samples": [s._asdict() for s in samples]}, default=str).encode()
        scores = self._scores(self._answer(body), len(samples))
        return [_checked(score) for score in scores]

    def _answer(self, body: bytes) -> bytes:
        pause_s = self._settings.backoff_s
        for left in reversed(range(self._settings.retries + 1)):
            asked_s = None
            try:
                status, asked_s, answer = self._post(body)
                if status == http.HTTPStatus.OK:
                    return answer
                said = answer.decode(errors="replace")[:_SAID_CHARACTERS]
                failure: Exception = RuntimeError(
                    f"the reward server {self._settings.url} answered with status {status}: {said}"
                )
                if status not in _TRY_AGAIN:
                    raise failure
            except TimeoutError:
                failure = RewardHungError(
                    f"the reward server {self._settings.url} did not answer within "
                    f"{self._settings.timeout_s:g} s"
                )
            except (OSError, http.client.HTTPException) as error:
                failure = RuntimeError(
                    f"the reward server {self._settings.url} is not there: "
                    f"{type(error).__name__}: {error}"
                )
            if not left:
                break
            time.sleep(min(max(pause_s, asked_s or 0.0), MAX_PAUSE_S))
            pause_s *= 2
        raise failure

    def _post(self, body: bytes) -> tuple[int, float | None, bytes]:
        """Status, seconds that the server asks to wait, and answer; all within the time limit."""
        deadline = time.monotonic() + self._settings.timeout_s
        connection = self._connection()
        try:
            connection.response_class = partial(_TimedResponse, deadline=deadline)  # type: ignore[assignment]
            connection.connect()
            connection.sock.settimeout(_left_s(deadline))
            connection.request("POST", self._target, body=body, headers=self._headers)
            response = connection.getresponse()
            answer = b""
            while True:
                part = response.read1(65536)
                if not part:
                    break
                answer += part
                if len(answer) > MAX_ANSWER_BYTES:
                    raise http.client.HTTPException(f"an answer of over {MAX_ANSWER_BYTES} bytes")
            return response.status, _seconds(response.getheader("Retry-After")), answer
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        timeout_s = self._settings.timeout_s
        if self._is_secure:
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=timeout_s, context=ssl.create_default_context()
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)

    def _scores(self, answer: bytes, count: int) -> list[Any]:
        try:
            scores = json.loads(answer)["scores"]
        except (ValueError, KeyError, TypeError) as error:
            raise RuntimeError(
                f"the reward server {self._settings.url} must answer with "
                f'{{"scores": [...]}}, got {answer[:_SAID_CHARACTERS]!r}'
            ) from error
        if not isinstance(scores, list) or len(scores) != count:
            raise RuntimeError(
                f"the reward server {self._settings.url} must answer with {count} scores, got "
                f"{scores!r:.300}"
            )
        return scores


def _checked(score: Any) -> float | Exception:
    if isinstance(score, bool | int | float):
        try:
            return float(score)
        except OverflowError as error:
            return error
    return TypeError(f"a reward server must answer with numbers, got {score!r:.100}")


def _seconds(header: str | None) -> float | None:
    return float(header) if header is not None and header.isdecimal() else None
