"""A real HTTP server that answers, fails, stalls and lies: what is sent, and sent again."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megappo.config.rewards import RemoteRewardSection, RewardSection
from megappo.errors import UserError
from megappo.rewards.base import RewardHungError, Sample
from megappo.rewards.remote import RemoteReward
from megappo.rewards.scorer import Scorer


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen, self.headers, self.script = [], [], []
        self.stall = threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/score?model=a"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        samples = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
        self.server.seen.append((self.path, samples))
        self.server.headers.append(dict(self.headers))
        act = self.server.script.pop(0) if self.server.script else "answer"
        if act == "stall":
            self.server.stall.wait(20)
        elif act == "drip":
            self.send_response(200)
            self.end_headers()
            while not self.server.stall.wait(0.05):
                try:
                    self.wfile.write(b" ")
                except OSError:
                    return
        elif act == "drip headers":
            while not self.server.stall.wait(0.05):
                try:
                    self.wfile.write(b"HTTP/1.1 200 OK\r\n" if not self.close_connection else b"x")
                    self.close_connection = True
                except OSError:
                    return
        elif act == "hang up":
            self.connection.shutdown(socket.SHUT_RDWR)
        elif act == "answer":
            self.answer(200, json.dumps({"scores": [float(s["response"]) for s in samples]}))
        elif isinstance(act, int):
            self.answer(act, "no: " + "x" * 1000)
        else:
            self.answer(200, act)

    def answer(self, status, text):
        self.send_response(status)
        if status == 429:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.stall.set()
    server.shutdown()
    server.server_close()
    thread.join()


def sample(response="2"):
    return Sample("mine", response, "truth", {"level": 3})


def reward(server, **settings):
    return RemoteReward(
        RemoteRewardSection(**{"url": server.url, "backoff_s": 0.05, "timeout_s": 5} | settings)
    )


def test_samples_are_sent_in_groups_and_scores_come_back_in_order(server):
    settings = RewardSection(
        sources={"*": "remote"}, remote=RemoteRewardSection(url=server.url, batch_size=2)
    )
    rows = [sample(str(n)) for n in (3, 1, 2)]
    assert Scorer(settings).score(rows).scores == [3.0, 1.0, 2.0]
    assert sorted(len(samples) for _, samples in server.seen) == [1, 2]
    path, samples = next(entry for entry in server.seen if len(entry[1]) == 2)
    assert path == "/score?model=a"
    assert samples[0] == {
        "data_source": "mine",
        "response": "3",
        "ground_truth": "truth",
        "extra_info": {"level": 3},
    }


@pytest.mark.parametrize("act", [500, 503, 408, "hang up", "stall"])
def test_a_failure_that_may_pass_is_tried_again(server, act):
    server.script = [act, act]
    timeout_s = 2 if act == "stall" else 5  # also the answer's
    assert reward(server, retries=2, timeout_s=timeout_s).score([sample()]) == [2.0]
    assert len(server.seen) == 3


def test_a_busy_server_is_given_the_time_that_it_asks_for(server):
    server.script = [429]
    started = time.monotonic()
    assert reward(server, retries=1).score([sample()]) == [2.0]
    assert time.monotonic() - started >= 1.0


@pytest.mark.parametrize(
    ("act", "retries", "asked", "message"),
    [
        (500, 1, 2, "answered with status 500: no: x"),
        (403, 3, 1, "answered with status 403"),
        (302, 3, 1, "answered with status 302"),
        ("hang up", 0, 1, "is not there: "),
        ("[1]", 3, 1, "must answer with {"),
        ("words", 3, 1, "must answer with {"),
        ('{"scores": [1, 2]}', 3, 1, r"must answer with 1 scores, got \[1, 2\]"),
    ],
)
def test_what_stays_wrong_is_a_named_error(server, act, retries, asked, message):
    server.script = [act] * 9
    with pytest.raises(RuntimeError, match=message):
        reward(server, retries=retries).score([sample()])
    assert len(server.seen) == asked


@pytest.mark.parametrize("act", ["stall", "drip", "drip headers"])
def test_a_server_that_does_not_come_to_an_end_is_given_up_on_time(server, act):
    server.script = [act] * 2
    started = time.monotonic()
    with pytest.raises(RewardHungError, match=r"did not answer within 0\.3 s"):
        reward(server, retries=1, timeout_s=0.3).score([sample()])
    assert time.monotonic() - started < 10


def test_a_time_out_is_an_error_and_counted_among_the_time_outs(server):
    server.script = ["stall"]
    section = RemoteRewardSection(url=server.url, timeout_s=2, retries=0)
    settings = RewardSection(
        sources={"*": "remote"}, remote=section, num_threads=1, max_error_rate=0.5
    )
    result = Scorer(settings).score([sample("1"), sample("2")])
    assert (result.scores, result.errors, result.timeouts) == ([0.0, 2.0], 1, 1)


def test_a_score_that_is_no_number_is_an_error_of_its_sample(server):
    server.script = ['{"scores": [1, null, "2", 1' + "0" * 400 + "]}"]
    one, none, text, huge = reward(server).score([sample()] * 4)
    assert isinstance(huge, OverflowError)
    assert one == 1.0
    assert "must answer with numbers, got None" in str(none)
    assert "got '2'" in str(text)


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(RuntimeError, match=r"127\.0\.0\.1:1/ is not there: ConnectionRefused"):
        RemoteReward(RemoteRewardSection(url="http://127.0.0.1:1/", retries=0)).score([sample()])


def test_a_key_is_sent_as_a_bearer_and_shown_nowhere(server, monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_KEY", "very-secret")
    server.script = [401]
    settings = RewardSection(
        sources={"*": "remote"},
        remote=RemoteRewardSection(url=server.url, api_key_env="JUDGE_KEY"),
        max_error_rate=1.0,
    )
    assert Scorer(settings).score([sample()]).errors == 1
    assert server.headers[0]["Authorization"] == "Bearer very-secret"
    assert "status 401" in caplog.text
    assert "very-secret" not in caplog.text


def test_proxies_of_the_environment_are_not_used(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert reward(server).score([sample()]) == [2.0]


def test_settings_that_cannot_work_are_refused_at_start(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(UserError, match=r"remote\.url is '': name the server"):
        RemoteReward(RemoteRewardSection())
    with pytest.raises(UserError, match="names JUDGE_KEY, which is not set"):
        RemoteReward(RemoteRewardSection(url="http://h", api_key_env="JUDGE_KEY"))
    with pytest.raises(ValueError, match="url is 'ftp://h'"):
        RemoteRewardSection(url="ftp://h")
    with pytest.raises(ValueError, match="is no name of an environment variable") as caught:
        RemoteRewardSection(url="http://h", api_key_env="sk-secret!")
    assert "sk-secret" not in str(caught.value)
