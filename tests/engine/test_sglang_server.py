"""A real SGLang server that this test started, used as one that somebody else runs."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from conftest import CONTEXT, VOCABULARY
from test_sglang_engine import FREE, GREEDY, PROMPTS, ask, assert_parity, greedy_tokens
from transformers import AutoTokenizer, Qwen2ForCausalLM

from megappo.rollout.engine import EngineDied, EngineGone, EngineRefused
from megappo.rollout.sampling import SamplingSettings
from megappo.rollout.server_checks import WantedModel, wait_until_healthy
from megappo.rollout.server_client import ServerClient
from megappo.rollout.sglang_server import ServerSettings, SGLangServer
from megappo.rollout.sglang_settings import CONTEXT_RESERVE
from tests.sglang_server import KEY, LaunchedServer

# One server starts; on a loaded machine it takes minutes.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

START_S = 600.0


@pytest.fixture(scope="module")
def launched(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LaunchedServer]:
    log_file = tmp_path_factory.mktemp("server") / "server.log"
    server = LaunchedServer(tiny_model, log_file, context_length=CONTEXT + CONTEXT_RESERVE)
    server.start()
    try:
        wait_until_healthy(ServerClient(server.url, api_key=KEY), wait_s=START_S)
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def settings(launched: LaunchedServer, tiny_model: Path, tiny_weights) -> ServerSettings:
    return ServerSettings(
        url=launched.url,
        model=WantedModel(
            model_type="qwen2",
            vocab_size=VOCABULARY,
            num_kv_heads=2,
            weight_names=frozenset(tiny_weights),
            context_length=CONTEXT,
            dtype="float32",
            device="cpu",
            uses_stop_strings=True,
            uses_min_p=False,
        ),
        tokenizer=AutoTokenizer.from_pretrained(tiny_model),
        api_key=KEY,
        verify_sync="always",
        timeout_s=120,
        wait_s=2,
    )


@pytest.fixture
def server(settings: ServerSettings, tiny_weights) -> Iterator[SGLangServer]:
    with SGLangServer(settings) as server:
        push(server, tiny_weights, version=1)
        yield server


def push(server: SGLangServer, weights, *, version: int, names=None):
    return server.update_weights(
        weights.items(), expected_names=set(names or weights), version=version
    )


def changed(weights, *, seed: int = 3):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: weight + 0.05 * torch.randn(weight.shape, generator=generator)
        for name, weight in weights.items()
    }


@pytest.mark.parametrize("bucket_bytes", [1, 20_000, 1 << 30])
def test_pushed_weights_answer_as_transformers_does_with_them(
    settings, tiny_model, tiny_weights, bucket_bytes
):
    weights = changed(tiny_weights)
    model = Qwen2ForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    model.load_state_dict(weights)
    with SGLangServer(replace(settings, bucket_bytes=bucket_bytes)) as server:
        report = push(server, weights, version=7)
        completions = ask(server, PROMPTS, GREEDY)
    assert report.num_tensors == len(weights)
    assert report.num_bytes == sum(weight.nbytes for weight in weights.values())
    assert report.num_verified == 15  # embedding, norm, head, twelve of the last layer
    assert [c.token_ids for c in completions] == [greedy_tokens(model, p, 12) for p in PROMPTS]
    assert_parity(model, completions)


def test_a_sample_depends_on_its_seed_as_with_an_engine_of_our_own(server, engine):
    assert server.facts.honours_seeds
    assert server.facts.tp_size == 1
    prompts = [PROMPTS[i % 6] for i in range(64)]
    answers = ask(server, prompts, FREE)
    assert ask(server, prompts[:1], FREE)[0].token_ids == answers[0].token_ids
    own = ask(engine, prompts, FREE)
    assert [c.token_ids for c in answers] == [c.token_ids for c in own]
    assert [c.text for c in answers] == [c.text for c in own]
    assert len({c.token_ids for c in answers}) == 64


def test_stop_strings_end_a_response_and_its_text(server):
    (whole,) = ask(server, PROMPTS[3:4], GREEDY)
    stop = whole.text[3:5]
    (cut,) = ask(
        server, PROMPTS[3:4], SamplingSettings(max_new_tokens=12, temperature=0.0, stop=(stop,))
    )
    assert (cut.finish_reason, cut.text) == ("stop", whole.text[: whole.text.index(stop)])


def test_two_thousand_requests_need_no_more_descriptors(server):
    one = SamplingSettings(max_new_tokens=1, ignore_eos=True)
    prompts = [(3 + i % 120, 40 + i % 7) for i in range(2048)]
    mine = psutil.Process()
    limits = mine.rlimit(psutil.RLIMIT_NOFILE)
    try:
        mine.rlimit(psutil.RLIMIT_NOFILE, (mine.num_fds() + 8, limits[1]))
        answers = ask(server, prompts, one)
    finally:
        mine.rlimit(psutil.RLIMIT_NOFILE, limits)
    assert [c.token_ids for c in answers[:40]] == [
        c.token_ids for c in ask(server, prompts[:40], one)
    ]


def test_responses_that_are_broken_off_are_sampled_again_and_counted(server, monkeypatch):
    long = SamplingSettings(max_new_tokens=200, ignore_eos=True)
    prompts = [PROMPTS[i % 6] for i in range(24)]
    undisturbed = [c.token_ids for c in ask(server, prompts, long)]
    assert server.num_aborted == 0
    client, stop = ServerClient(server.settings.url, api_key=KEY), threading.Event()
    sends: list[int] = []
    send = server._send

    def counted(requests):
        sends.append(len(requests))
        return send(requests)

    def abort_until_asked_again() -> None:
        while len(sends) < 2 and not stop.wait(0.05):
            client.post("/abort_request", {"abort_all": True}, timeout_s=60, what="aborting")

    monkeypatch.setattr(server, "_send", counted)
    thread = threading.Thread(target=abort_until_asked_again)
    thread.start()
    completions = ask(server, prompts, long)
    stop.set()
    thread.join()
    assert [c.token_ids for c in completions] == undisturbed
    assert 0 < server.num_aborted == sum(sends[1:])


def test_the_next_run_uses_the_same_server(settings, launched, tiny_weights):
    answers = []
    for _ in range(2):
        with SGLangServer(settings) as server:
            with pytest.raises(RuntimeError, match="no weights were pushed"):
                ask(server, PROMPTS, FREE)
            push(server, tiny_weights, version=1)
            answers.append(ask(server, PROMPTS, FREE))
    assert answers[0] == answers[1]
    assert launched.is_running


def test_a_run_that_died_in_a_push_leaves_the_server_usable(settings, tiny_weights):
    died = SGLangServer(settings)
    died._client.post("/begin_weight_update", {}, timeout_s=60, what="opening an update")
    died._link._group.close()  # without a word to the server
    with SGLangServer(settings) as server:
        push(server, tiny_weights, version=1)
        assert ask(server, PROMPTS, FREE)


def set_version(server: SGLangServer, version: str) -> None:
    server._client.post(
        "/update_weight_version",
        {"new_version": version, "abort_all_requests": False},
        timeout_s=60,
        what="pushing as somebody else",
    )


def test_a_server_that_another_run_took_is_left_to_it(settings, tiny_weights):
    first = SGLangServer(settings)
    push(first, tiny_weights, version=1)
    with SGLangServer(settings) as second:
        taken = rf"{settings.url} is used by another run, .* version megappo-\w+-0"
        with pytest.raises(EngineGone, match=taken):
            ask(first, PROMPTS, FREE)
        with pytest.raises(EngineGone, match=taken):
            push(first, tiny_weights, version=2)
        first.shutdown()
        push(second, tiny_weights, version=1)
        assert ask(second, PROMPTS, FREE)


@pytest.mark.parametrize("theirs", ["default", "1"])
def test_answers_of_weights_that_are_not_ours_are_refused(server, tiny_weights, theirs):
    before = ask(server, PROMPTS, FREE)
    set_version(server, theirs)
    with pytest.raises(EngineRefused, match=rf"weight version {theirs}, and version megappo-\w+-1"):
        ask(server, PROMPTS, FREE)
    # Not over a group that a server which was started again is no longer in.
    with pytest.raises(EngineRefused, match=rf"started again meanwhile .*version '{theirs}'"):
        push(server, tiny_weights, version=2)
    set_version(server, server._version_word(1))
    push(server, tiny_weights, version=2)
    assert ask(server, PROMPTS, FREE) == before


def test_a_tensor_that_is_not_finite_is_refused_by_name(server, tiny_weights):
    name = "model.layers.1.mlp.up_proj.weight"
    broken = {**tiny_weights, name: tiny_weights[name].clone()}
    broken[name][3, 5] = float("nan")
    with pytest.raises(ValueError, match=rf"'{name}' has 1 of 6144 elements that are NaN"):
        push(server, broken, version=2)
    with pytest.raises(RuntimeError, match="push of weight version 2 did not complete"):
        ask(server, PROMPTS, FREE)
    push(server, tiny_weights, version=3)
    assert ask(server, PROMPTS, FREE)


def test_every_name_must_come_once(server, tiny_weights):
    unknown = {**tiny_weights, "model.layers.0.mlp.up_prj.weight": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"knows no weight 'model.layers.0.mlp.up_prj.weight'"):
        push(server, unknown, version=2, names=tiny_weights)
    missing = {n: w for n, w in tiny_weights.items() if n != "model.norm.weight"}
    with pytest.raises(ValueError, match=r"1 of \d+ weights were not pushed, .*model.norm"):
        push(server, missing, version=2, names=tiny_weights)


def test_a_weight_that_changes_on_its_way_is_found_out(server, tiny_weights):
    name = "model.layers.1.self_attn.o_proj.weight"

    def changing():
        for key, weight in tiny_weights.items():
            sent = weight.clone()
            yield key, sent
            if key == name:
                sent.view(-1)[-1] += 1e-3  # after its copy was taken, before its bucket goes

    with pytest.raises(EngineRefused, match=name.replace(".", r"\.")):
        server.update_weights(changing(), expected_names=set(tiny_weights), version=2)
    with pytest.raises(RuntimeError, match="did not complete"):
        ask(server, PROMPTS, FREE)


def test_a_tensor_of_another_shape_is_refused_with_its_name(server, tiny_weights):
    wrong = {**tiny_weights, "model.norm.weight": torch.ones(32)}
    with pytest.raises(EngineRefused, match=r"model\.norm\.weight"):
        push(server, wrong, version=2)


@pytest.mark.parametrize("key", ["another-key", None])
def test_a_wrong_key_is_refused_and_not_shown(settings, key):
    with pytest.raises(EngineRefused, match=r"refused the API key \(401\)") as caught:
        SGLangServer(replace(settings, api_key=key))
    assert "another-key" not in str(caught.value)


def test_a_dead_port_is_refused_with_its_url(settings):
    with pytest.raises(EngineGone, match=r"http://127.0.0.1:9 was not healthy within .* 1 s"):
        SGLangServer(replace(settings, url="http://127.0.0.1:9", wait_s=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "serves a model of type qwen2 .* is of type llama"),
        ({"vocab_size": VOCABULARY + 1}, f"vocabulary has no token {VOCABULARY}, .*128"),
        ({"vocab_size": VOCABULARY - 1}, f"more than the {VOCABULARY - 1} tokens"),
        ({"dtype": "bfloat16"}, "its dtype is 'float32', and 'bfloat16' is needed"),
        ({"device": "cuda"}, "its device is 'cpu', and 'cuda' is needed"),
        ({"context_length": CONTEXT + 1}, f"holds {CONTEXT + 8} tokens .* need {CONTEXT + 9}"),
    ],
)
def test_a_server_of_something_else_is_refused_with_both(settings, change, message):
    with pytest.raises(EngineGone, match=message) as caught:
        SGLangServer(replace(settings, model=replace(settings.model, **change)))
    assert settings.url in str(caught.value)


def test_a_model_of_another_depth_is_refused(settings, tiny_weights):
    deeper = {name.replace("layers.1.", "layers.2.") for name in tiny_weights} | set(tiny_weights)
    model = replace(settings.model, weight_names=frozenset(deeper))
    with pytest.raises(EngineGone, match=r"lacks \d+ weights, among them model\.layers\.2\."):
        SGLangServer(replace(settings, model=model))
    shallower = frozenset(name for name in tiny_weights if "layers.1." not in name)
    model = replace(settings.model, weight_names=shallower)
    with pytest.raises(EngineGone, match=r"model.path does not: .*among them model\.layers\.1\."):
        SGLangServer(replace(settings, model=model))


def test_an_address_that_is_not_this_hosts_names_the_setting(settings):
    with pytest.raises(EngineRefused, match=r"203\.0\.113\.7.*rollout.sync_address"):
        SGLangServer(replace(settings, sync_address="203.0.113.7"))


def test_a_server_that_hangs_is_noticed_after_the_time_and_used_again(
    settings, launched, tiny_weights
):
    server = SGLangServer(settings)
    push(server, tiny_weights, version=1)
    before = ask(server, PROMPTS, FREE)
    server.settings = replace(settings, timeout_s=1)
    launched.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(EngineDied, match="did not answer within 1 s while telling its health"):
            ask(server, PROMPTS, FREE)
    finally:
        launched.send_signal(signal.SIGCONT)
    server.shutdown()
    with SGLangServer(replace(settings, wait_s=120)) as again:
        push(again, tiny_weights, version=1)
        assert ask(again, PROMPTS, FREE) == before


def test_a_server_that_is_killed_while_it_generates_is_noticed_and_waited_for(
    settings, launched, tiny_weights
):
    """The last test: it leaves no server behind."""
    server = SGLangServer(settings)
    push(server, tiny_weights, version=1)
    long = SamplingSettings(max_new_tokens=280, ignore_eos=True)
    killed_at: list[float] = []

    def kill() -> None:
        time.sleep(0.3)
        launched.kill()
        killed_at.append(time.monotonic())

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(EngineDied, match=rf"{settings.url} is gone while generating 512"):
        ask(server, [PROMPTS[i % 6] for i in range(512)], long)
    thread.join()
    assert time.monotonic() - killed_at[0] < 60
    server.shutdown()
    start = time.monotonic()
    with pytest.raises(EngineGone, match=r"not healthy within rollout\.server_wait_s 2 s"):
        SGLangServer(settings)
    assert time.monotonic() - start >= 2
