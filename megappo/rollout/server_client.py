"""JSON over HTTP to one SGLang server.

A call opens its own connection, straight to the server: proxies of the environment are for other
hosts. All requests of a generation travel in one call, so a rank holds one connection however many
there are. A host that vanishes without a word is noticed by TCP's keep-alive.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

import orjson

from megappo.rollout.engine import EngineDied, EngineRefused

_KEEP_ALIVE = (
    (socket.SO_KEEPALIVE, socket.SOL_SOCKET, 1),
    (socket.TCP_KEEPIDLE, socket.IPPROTO_TCP, 15),
    (socket.TCP_KEEPINTVL, socket.IPPROTO_TCP, 5),
    (socket.TCP_KEEPCNT, socket.IPPROTO_TCP, 3),
)
_MESSAGE_CHARACTERS = 500
_NO_KEY = (401, 403)


class ServerClient:
    """Asks one server. Errors name its URL, and never the key."""

    def __init__(self, url: str, *, api_key: str | None) -> None:
        """Connects to nothing yet.

        Args:
            url: `http://HOST:PORT` or `https://...`, perhaps with a path before SGLang's own.
            api_key: sent as a bearer token; None sends none.
        """
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        assert parts.hostname is not None, "the config's checks let no such URL pass"
        self._is_secure = parts.scheme == "https"
        self.host: str = parts.hostname
        self.port: int = parts.port or (443 if self._is_secure else 80)
        self._prefix = parts.path
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str, *, timeout_s: float, what: str) -> Any:
        """The answer to a GET, decoded; see `post`."""
        return self._call("GET", path, None, timeout_s=timeout_s, what=what)

    def post(self, path: str, body: Any, *, timeout_s: float, what: str) -> Any:
        """The answer to a POST, decoded; None if it is empty or no JSON.

        Args:
            path: begins with a slash.
            body: becomes JSON.
            timeout_s: for the server to answer.
            what: names the call in errors.

        Raises:
            EngineDied: nobody listens, the connection broke, or no answer came in time.
            EngineRefused: the server answered with an error.
        """
        return self._call("POST", path, orjson.dumps(body), timeout_s=timeout_s, what=what)

    def post_aside(self, path: str, body: Any, *, timeout_s: float, what: str) -> Future[Any]:
        """A `post` on another thread, whose answer or error the future has."""
        posted: Future[Any] = Future()

        def run() -> None:
            try:
                posted.set_result(self.post(path, body, timeout_s=timeout_s, what=what))
            except BaseException as error:
                posted.set_exception(error)

        # A daemon: a server that hangs must not keep this process from its end.
        threading.Thread(target=run, name="server-post", daemon=True).start()
        return posted

    def _call(
        self, method: str, path: str, body: bytes | None, *, timeout_s: float, what: str
    ) -> Any:
        connection = self._connection(timeout_s)
        try:
            connection.connect()
            for option, level, value in _KEEP_ALIVE:
                connection.sock.setsockopt(level, option, value)
            connection.request(method, self._prefix + path, body=body, headers=self._headers)
            response = connection.getresponse()
            status, content = response.status, response.read()
        except TimeoutError as error:
            raise EngineDied(
                f"the server {self.url} did not answer within {timeout_s:g} s while {what}"
            ) from error
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            raise EngineDied(
                f"the server {self.url} is gone while {what}: {type(error).__name__}: {error}"
            ) from error
        finally:
            connection.close()
        if status in _NO_KEY:
            raise EngineRefused(
                f"the server {self.url} refused the API key ({status}) while {what}: put the key "
                "that it was started with (--api-key) into the variable that rollout.api_key_env "
                "names; where it has --admin-api-key, that one"
            )
        if status != http.HTTPStatus.OK:
            said = content.decode(errors="replace")[:_MESSAGE_CHARACTERS]
            raise EngineRefused(f"the server {self.url} refused {what} ({status}): {said}")
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError:
            return None  # `/health` and `/flush_cache` answer with words or nothing.

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._is_secure:
            return http.client.HTTPSConnection(
                self.host, self.port, timeout=timeout_s, context=ssl.create_default_context()
            )
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
