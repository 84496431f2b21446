"""Calls over HTTP: what each failure becomes. The other side is a plain web server of this test."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megappo.rollout.engine import EngineDied, EngineRefused
from megappo.rollout.server_client import ServerClient


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        name = self.path.rpartition("/")[2]
        if name == "hang":
            time.sleep(2)
        elif name == "cut":
            self.connection.shutdown(socket.SHUT_RDWR)
        elif name.isdecimal():
            self.answer(int(name), b"too many things")
        else:
            said = {"path": self.path, "key": self.headers["Authorization"]}
            self.answer(200, json.dumps({**said, "body": json.loads(body)}).encode())

    def answer(self, status, content):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def post(url, name, *, key=None, timeout_s=10.0):
    client = ServerClient(url, api_key=key)
    return client.post(f"/{name}", {"a": 1}, timeout_s=timeout_s, what="testing")


def test_the_key_goes_along_and_the_url_may_have_a_path(url):
    assert post(url + "/models/", "x", key="k") == {
        "path": "/models/x", "key": "Bearer k", "body": {"a": 1}
    }  # fmt: skip
    assert post(url, "x")["key"] is None


def test_a_proxy_of_the_environment_is_not_asked(url, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert post(url, "x")["path"] == "/x"


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_says_where_the_key_belongs_and_not_the_key(url, status):
    with pytest.raises(EngineRefused, match=r"refused the API key .*rollout.api_key_env") as caught:
        post(url, str(status), key="tops3cret")
    assert url in str(caught.value)
    assert "tops3cret" not in str(caught.value)


@pytest.mark.parametrize("status", [400, 404, 500, 503])
def test_a_refusal_has_the_servers_words(url, status):
    with pytest.raises(EngineRefused, match=rf"refused testing \({status}\): too many things"):
        post(url, str(status))


def test_nobody_there_is_a_death_with_the_url():
    with pytest.raises(EngineDied, match=r"http://127.0.0.1:9 is gone while testing: .*refused"):
        post("http://127.0.0.1:9", "x")


def test_a_connection_that_is_cut_is_a_death(url):
    with pytest.raises(EngineDied, match="is gone while testing"):
        post(url, "cut")


def test_a_server_that_hangs_is_a_death_after_the_time(url):
    with pytest.raises(EngineDied, match=r"did not answer within 0\.2 s while testing"):
        post(url, "hang", timeout_s=0.2)
