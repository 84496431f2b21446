"""A real SGLang on CPU, shared by all tests of this file; transformers is the oracle."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from conftest import CONTEXT, VOCABULARY, settings_for
from transformers import Qwen2ForCausalLM

from megappo.errors import ModelError, UserError
from megappo.rollout.engine import EngineRefused, GenerationRequest, response_text
from megappo.rollout.sampling import SamplingSettings, end_token_ids, sample_seed
from megappo.rollout.sglang_attention import MAX_PADDED_TOKENS
from megappo.rollout.sglang_engine import SGLangEngine
from megappo.rollout.sglang_settings import EngineSettings
from megappo.rollout.weight_update import _Push
from megappo.types import Completion

pytestmark = pytest.mark.engine

PROMPTS = [(40 + i, 72, 90 - i, *range(10, 10 + i)) for i in range(6)]
GREEDY = SamplingSettings(max_new_tokens=12, temperature=0.0, ignore_eos=True)
FREE = SamplingSettings(max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def hf(tiny_model: Path) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def ask(
    engine: SGLangEngine, prompts, sampling: SamplingSettings, *, seeds=None
) -> list[Completion]:
    seeds = seeds or range(len(prompts))
    return engine.generate(
        [
            GenerationRequest(token_ids=tuple(prompt), seed=seed, sampling=sampling)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
    )


def text_of(engine: SGLangEngine, ids: tuple[int, ...]) -> str:
    return response_text(engine._process.manager.tokenizer, ids, matched=None)


@torch.inference_mode()
def log_probs_of(model, prompt, response, *, temperature: float = 1.0) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *response]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


@torch.inference_mode()
def greedy_tokens(model, prompt, count: int) -> tuple[int, ...]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


def assert_parity(model, completions: list[Completion], *, temperature: float = 1.0) -> None:
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = log_probs_of(model, prompt, completion.token_ids, temperature=temperature)
        got = torch.tensor(completion.log_probs)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_greedy_tokens_and_log_probs_equal_transformers(engine, hf):
    completions = ask(engine, PROMPTS, GREEDY)
    assert [c.token_ids for c in completions] == [greedy_tokens(hf, p, 12) for p in PROMPTS]
    assert_parity(hf, completions)


def test_log_probs_are_those_of_logits_over_temperature(engine, hf):
    sampling = SamplingSettings(max_new_tokens=12, temperature=0.6, ignore_eos=True)
    assert_parity(hf, ask(engine, PROMPTS, sampling), temperature=0.6)


def test_sequences_too_long_to_pad_agree_with_transformers(engine, hf):
    prompt = tuple(3 + (7 * i) % 90 for i in range(CONTEXT - 20))
    assert len(prompt) > MAX_PADDED_TOKENS
    (completion,) = ask(engine, [prompt], GREEDY)
    expected = log_probs_of(hf, prompt, completion.token_ids)
    torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-4, rtol=0)


def test_same_requests_give_bitwise_equal_answers(engine):
    prompts = [PROMPTS[i % 6] for i in range(64)]
    first, second = ask(engine, prompts, FREE), ask(engine, prompts, FREE)
    assert first == second
    assert len({c.token_ids for c in first}) == 64


def test_a_sample_depends_on_its_seed_and_not_on_its_batch(engine):
    prompts, seeds = [PROMPTS[1]] * 16, [sample_seed(5, step=0, row=0, sample=k) for k in range(16)]
    together = [c.token_ids for c in ask(engine, prompts, FREE, seeds=seeds)]
    backwards = [c.token_ids for c in ask(engine, prompts, FREE, seeds=seeds[::-1])]
    alone = [ask(engine, [PROMPTS[1]], FREE, seeds=[seed])[0].token_ids for seed in seeds[:3]]
    assert backwards[::-1] == together
    assert alone == together[:3]
    assert len(set(together)) == 16


def test_sampled_tokens_follow_the_models_distribution(engine, hf):
    n = 2000
    drawn = ask(engine, [PROMPTS[0]] * n, SamplingSettings(max_new_tokens=1, ignore_eos=True))
    with torch.inference_mode():
        p = hf(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1).double()
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in drawn]), minlength=VOCABULARY)
    chi_squared = ((counts - n * p) ** 2 / (n * p)).sum().item()
    # Mean V - 1, variance 2 (V - 1) (rare tokens widen it somewhat): five deviations.
    assert abs(chi_squared - 127) < 5 * (2 * 127) ** 0.5


def kept(p: torch.Tensor, *, top_p: float = 1.0, top_k: int = -1, min_p: float = 0.0) -> set[int]:
    """By each rule on its own: the k likeliest, the smallest set of mass top_p, the min_p share."""
    order = p.argsort(descending=True).tolist()
    mass, nucleus = 0.0, set()
    for token in order:
        if mass <= top_p:
            nucleus.add(token)
        mass += p[token].item()
    likeliest = set(order[:top_k] if top_k > 0 else order)
    return nucleus & likeliest & {t for t in order if p[t] >= min_p * p.max()}


@pytest.mark.parametrize(
    "cut",
    [
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.3},
        {"min_p": 0.02, "top_p": 0.8, "top_k": 12},
        {"min_p": 0.3, "top_k": 1000},
    ],
    ids=str,
)
def test_cut_sampling_draws_the_kept_tokens_by_their_shares_and_reports_the_full_softmax(
    engine, hf, cut
):
    n = 1000
    sampling = SamplingSettings(max_new_tokens=1, ignore_eos=True, **cut)
    drawn = ask(engine, [PROMPTS[0]] * n, sampling)
    assert ask(engine, [PROMPTS[0]] * 8, sampling) == drawn[:8], "seeds decide"
    with torch.inference_mode():
        p = hf(torch.tensor([PROMPTS[0]])).logits[0, -1].double().softmax(-1)
    tokens = sorted(kept(p, **cut))
    assert 1 < len(tokens) < VOCABULARY / 2
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in drawn]), minlength=VOCABULARY)
    assert counts[tokens].sum() == n, "a token was drawn that is not kept"
    expected = n * p[tokens] / p[tokens].sum()
    chi_squared = ((counts[tokens] - expected) ** 2 / expected).sum().item()
    degrees = len(tokens) - 1
    assert chi_squared < degrees + 5 * (2 * degrees) ** 0.5
    for completion in drawn[:50]:
        (token,), (log_prob,) = completion.token_ids, completion.log_probs
        assert log_prob == pytest.approx(p[token].log().item(), abs=1e-4)


def test_a_draw_with_min_p_depends_on_its_seed_and_not_on_what_shares_its_batch(engine):
    # One that cuts nothing is drawn by another order of tokens next to one that does: not compared.
    settings = [replace(FREE, min_p=0.4), replace(FREE, temperature=0.0, min_p=0.4), FREE]
    requests = [
        GenerationRequest(token_ids=PROMPTS[i % 6], seed=i, sampling=settings[i % 3])
        for i in range(12)
    ]
    together = engine.generate(requests)
    alone = [engine.generate([request])[0] for request in requests[:2]]
    assert [c.token_ids for c in together[:2]] == [c.token_ids for c in alone]


def test_an_end_token_is_the_last_id_and_not_in_the_text(engine, hf):
    path = greedy_tokens(hf, PROMPTS[2], 12)
    end = path[4]
    length = path.index(end) + 1
    (completion,) = ask(
        engine,
        [PROMPTS[2]],
        SamplingSettings(max_new_tokens=12, temperature=0.0, stop_token_ids=(end,)),
    )
    assert completion.token_ids == path[:length]
    assert completion.finish_reason == "stop"
    assert completion.text == text_of(engine, path[: length - 1])


def test_every_end_token_of_the_model_ends_a_response(engine, tiny_model):
    sampling = SamplingSettings(max_new_tokens=80, stop_token_ids=end_token_ids(tiny_model))
    completions = ask(engine, [PROMPTS[i % 6] for i in range(128)], sampling)
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert {c.token_ids[-1] for c in stopped} == {1, 2}
    assert not any({1, 2} & set(c.token_ids[:-1]) for c in completions)


def test_a_response_that_is_cut_gets_no_end_token(engine):
    for completion in ask(engine, PROMPTS, FREE):
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == len(completion.log_probs) == 12


def test_a_stop_string_ends_a_response_and_stays_in_its_ids(engine, hf):
    path = greedy_tokens(hf, PROMPTS[3], 12)
    text = text_of(engine, path)
    stop = text[3:5]
    (completion,) = ask(
        engine, [PROMPTS[3]], SamplingSettings(max_new_tokens=12, temperature=0.0, stop=(stop,))
    )
    assert completion.finish_reason == "stop"
    assert completion.text == text[: text.index(stop)]
    assert completion.token_ids == path[: len(completion.token_ids)]
    assert stop in text_of(engine, completion.token_ids)


def test_no_requests_give_no_completions(engine):
    assert ask(engine, [], FREE) == []


def test_a_request_may_fill_the_context_and_not_pass_it(engine):
    prompt = tuple(range(3, 23))
    fits = SamplingSettings(max_new_tokens=CONTEXT - 20, ignore_eos=True)
    assert len(ask(engine, [prompt], fits)[0].token_ids) == CONTEXT - 20
    over = SamplingSettings(max_new_tokens=CONTEXT - 19, ignore_eos=True)
    with pytest.raises(UserError, match=f"20 prompt tokens and max_new_tokens {CONTEXT - 19}"):
        ask(engine, [prompt], over)


def test_more_requests_than_run_at_once_are_answered_in_order(engine, hf):
    one = SamplingSettings(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    prompts = [(3 + i % 120, 40 + i % 7) for i in range(600)]
    answers = [c.token_ids[0] for c in ask(engine, prompts, one)]
    with torch.inference_mode():
        expected = hf(torch.tensor(prompts)).logits[:, -1].argmax(-1).tolist()
    assert answers == expected


@pytest.mark.parametrize("bucket_bytes", [1, 20_000, 1 << 40])
def test_pushed_weights_are_used_whatever_the_bucket_size(
    engine, tiny_weights, tiny_model, bucket_bytes
):
    generator = torch.Generator().manual_seed(3)
    changed = {
        name: w + 0.05 * torch.randn(w.shape, generator=generator)
        for name, w in tiny_weights.items()
    }
    model = Qwen2ForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    model.load_state_dict(changed)
    settings = engine.settings
    engine.settings = settings_for(tiny_model, settings.log_file, bucket_bytes=bucket_bytes)
    before = ask(engine, PROMPTS, GREEDY)
    version = engine.weight_version + 1
    report = engine.update_weights(changed.items(), expected_names=set(changed), version=version)
    engine.settings = settings
    after = ask(engine, PROMPTS, GREEDY)
    assert engine.weight_version == version
    assert report.num_tensors == len(changed)
    assert report.num_bytes == sum(w.nbytes for w in changed.values())
    assert after != before
    assert_parity(model, after)


def test_pushes_leave_no_descriptors_behind(engine, tiny_weights):
    child = psutil.Process(engine.pids[0])

    def push() -> tuple[int, int]:
        engine.update_weights(
            tiny_weights.items(),
            expected_names=set(tiny_weights),
            version=engine.weight_version + 1,
        )
        return psutil.Process().num_fds(), child.num_fds()

    push()
    counts = [push() for _ in range(8)]
    assert max(mine for mine, _ in counts) <= counts[0][0] + 1
    assert max(theirs for _, theirs in counts) <= counts[0][1] + 1


def test_the_engine_keeps_the_staging_buffer_mapped_between_pushes(engine, tiny_weights):
    def mappings() -> list[str]:
        lines = Path(f"/proc/{engine.pids[0]}/maps").read_text().splitlines()
        return [line.split()[0] for line in lines if "/torch_" in line]

    push_names(engine, tiny_weights, tiny_weights)
    first = mappings()
    assert first
    push_names(engine, tiny_weights, tiny_weights)
    assert mappings() == first


def push_names(engine, weights, names) -> None:
    engine.update_weights(
        ((name, weights[name]) for name in names),
        expected_names=set(weights),
        version=engine.weight_version + 1,
    )


def test_a_misspelt_name_is_an_error_and_the_engine_waits_for_a_full_push(engine, tiny_weights):
    wrong = {**tiny_weights, "model.layers.0.mlp.up_prj.weight": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"knows no weight 'model.layers.0.mlp.up_prj.weight'"):
        engine.update_weights(wrong.items(), expected_names=set(tiny_weights), version=99)
    with pytest.raises(RuntimeError, match="push of weight version 99 did not complete"):
        ask(engine, PROMPTS, GREEDY)
    push_names(engine, tiny_weights, tiny_weights)
    assert ask(engine, PROMPTS, GREEDY)


def test_a_missing_tensor_is_an_error(engine, tiny_weights):
    names = [name for name in tiny_weights if name != "model.norm.weight"]
    total = len(tiny_weights)
    with pytest.raises(ValueError, match=rf"1 of {total} weights .*model.norm.weight"):
        push_names(engine, tiny_weights, names)


def test_a_tensor_that_comes_twice_is_an_error(engine, tiny_weights):
    with pytest.raises(ValueError, match=r"'model.norm.weight' was pushed twice"):
        push_names(engine, tiny_weights, [*tiny_weights, "model.norm.weight"])


def test_a_tensor_of_another_shape_is_refused_by_name_before_sglang_dies_of_it(
    engine, tiny_weights
):
    name = "model.layers.1.mlp.up_proj.weight"
    shapes = {key: tuple(weight.shape) for key, weight in tiny_weights.items()}
    wrong = {**tiny_weights, name: tiny_weights[name].T.contiguous()}
    with pytest.raises(ValueError, match=rf"'{name}' has shape \[64, 96\], .* \[96, 64\]"):
        engine.update_weights(wrong.items(), expected_names=shapes, version=90)
    with pytest.raises(RuntimeError, match="did not complete"):
        ask(engine, PROMPTS, GREEDY)


def test_a_tensor_of_another_dtype_is_refused_by_name(engine, tiny_weights):
    name = "model.layers.0.self_attn.q_proj.bias"
    wrong = {**tiny_weights, name: tiny_weights[name].bfloat16()}
    with pytest.raises(ValueError, match=rf"'{name}' is torch.bfloat16, .* torch.float32"):
        push_names(engine, wrong, wrong)
    with pytest.raises(RuntimeError, match="did not complete"):
        ask(engine, PROMPTS, GREEDY)


def test_a_bucket_that_is_never_sent_is_an_error(engine, tiny_weights, monkeypatch):
    send, dropped = _Push.send, []

    def send_all_but_one(push, bucket):
        if any("layers.0.mlp.up_proj" in name for name, _ in bucket):
            dropped.extend(bucket)
        else:
            send(push, bucket)

    monkeypatch.setattr(_Push, "send", send_all_but_one)
    monkeypatch.setattr(engine, "settings", replace(engine.settings, bucket_bytes=20_000))
    with pytest.raises(EngineRefused, match=r"loaded \d+ of 27 weights: a bucket was lost"):
        push_names(engine, tiny_weights, tiny_weights)
    assert dropped
    with pytest.raises(RuntimeError, match="did not complete"):
        ask(engine, PROMPTS, GREEDY)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((False, "no room"), "refused loading .*: no room"),
        ((True, "Success"), r"layers\.1\..* was sent, and process 0 .* holds"),
    ],
    ids=["refused", "lost although SGLang calls it a success"],
)
def test_a_bucket_that_sglang_does_not_load_is_an_error(
    engine, tiny_weights, monkeypatch, answer, message
):
    manager = engine._process.manager
    load, seen = manager.update_weights_from_tensor, []

    async def lose_the_last(request, raw_request):
        seen.append(request)
        return answer if len(seen) == 2 else await load(request, raw_request)

    monkeypatch.setattr(manager, "update_weights_from_tensor", lose_the_last)
    half = sum(weight.nbytes for weight in tiny_weights.values()) * 2 // 3
    settings = replace(engine.settings, verify_sync="always", bucket_bytes=half)
    monkeypatch.setattr(engine, "settings", settings)
    changed = {name: weight * 1.5 for name, weight in tiny_weights.items()}
    with pytest.raises(EngineRefused, match=message):
        push_names(engine, changed, changed)
    assert len(seen) == 2
    with pytest.raises(RuntimeError, match="did not complete"):
        ask(engine, PROMPTS, GREEDY)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_tensor_that_is_not_finite_is_refused_by_name(engine, tiny_weights, bad):
    name = "model.layers.1.mlp.up_proj.weight"
    broken = {**tiny_weights, name: tiny_weights[name].clone()}
    broken[name][3, 5] = bad
    with pytest.raises(ValueError, match=rf"'{name}' has 1 of 6144 elements that are NaN"):
        push_names(engine, broken, broken)
    with pytest.raises(RuntimeError, match="did not complete"):
        ask(engine, PROMPTS, GREEDY)


def test_a_push_that_fails_after_many_buckets_leaves_an_engine_that_takes_another(
    engine, tiny_weights, monkeypatch
):
    monkeypatch.setattr(engine, "settings", replace(engine.settings, bucket_bytes=20_000))
    name = list(tiny_weights)[-1]
    broken = {**tiny_weights, name: torch.full_like(tiny_weights[name], float("nan"))}
    with pytest.raises(ValueError, match=rf"'{name}' has .* elements that are NaN"):
        push_names(engine, broken, broken)
    push_names(engine, tiny_weights, tiny_weights)
    assert ask(engine, PROMPTS, GREEDY)


def test_a_bucket_that_sglang_refuses_is_an_error_that_names_its_weights(
    engine, tiny_weights, monkeypatch
):
    from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

    monkeypatch.setattr(engine, "settings", replace(engine.settings, bucket_bytes=20_000))
    process = engine._process

    def with_an_update_that_ends_early():
        for number, item in enumerate(tiny_weights.items()):
            if number == len(tiny_weights) // 2:
                end = process.manager.end_weight_update(EndWeightUpdateReqInput(), None)
                assert process.call(end, timeout_s=60, what="testing")[0]
            yield item

    with pytest.raises(EngineRefused, match=r"refused loading \d+ weights from \S+ to .* between"):
        engine.update_weights(
            with_an_update_that_ends_early(), expected_names=set(tiny_weights), version=99
        )
    push_names(engine, tiny_weights, tiny_weights)
    assert ask(engine, PROMPTS, GREEDY)


def test_large_finite_weights_are_sent(engine, tiny_weights):
    large = {**tiny_weights, "lm_head.weight": torch.full((VOCABULARY, 64), 3e38)}
    push_names(engine, large, large)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight",
        "model.layers.1.self_attn.k_proj.bias", "model.layers.1.self_attn.o_proj.weight",
        "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight",
    ],
)  # fmt: skip
def test_a_weight_that_changes_on_its_way_is_found_out(engine, tiny_weights, name, monkeypatch):
    monkeypatch.setattr(engine, "settings", replace(engine.settings, verify_sync="always"))

    def changing():
        for key, weight in tiny_weights.items():
            sent = weight.clone()
            yield key, sent
            if key == name:
                sent.view(-1)[-1] += 1e-3  # after its copy was taken, before its bucket goes

    version = engine.weight_version + 1
    with pytest.raises(RuntimeError, match=name.replace(".", r"\.")):
        engine.update_weights(changing(), expected_names=set(tiny_weights), version=version)
    with pytest.raises(RuntimeError, match="did not complete"):
        ask(engine, PROMPTS, GREEDY)
    report = engine.update_weights(
        tiny_weights.items(), expected_names=set(tiny_weights), version=version
    )
    assert report.num_verified == 15  # embedding, norm, head, twelve of the last layer
    assert ask(engine, PROMPTS, GREEDY)


def test_the_first_push_alone_is_verified_by_default(engine, tiny_weights, monkeypatch):
    monkeypatch.setattr(engine, "_verified", False)
    reports = [
        engine.update_weights(
            tiny_weights.items(),
            expected_names=set(tiny_weights),
            version=engine.weight_version + 1,
        )
        for _ in range(2)
    ]
    assert [report.num_verified for report in reports] == [15, 0]
    assert engine.settings.verify_sync == "first"


def test_an_exception_of_the_exporter_passes_and_leaves_the_engine_usable(engine, tiny_weights):
    def broken():
        yield from list(tiny_weights.items())[:3]
        raise KeyError("exporter")

    with pytest.raises(KeyError, match="exporter"):
        engine.update_weights(broken(), expected_names=set(tiny_weights), version=7)
    push_names(engine, tiny_weights, tiny_weights)
    assert ask(engine, PROMPTS, GREEDY)


def test_answers_of_stale_weights_are_an_error_that_names_both_versions(engine):
    from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

    manager, version = engine._process.manager, engine.weight_version

    def set_version(new: str) -> None:
        engine._process.call(
            manager.update_weight_version(UpdateWeightVersionReqInput(new_version=new)),
            timeout_s=60,
            what="testing",
        )

    set_version("41")
    with pytest.raises(RuntimeError, match=f"weight version 41, and version {version}"):
        ask(engine, PROMPTS, GREEDY)
    set_version(str(version))
    assert ask(engine, PROMPTS, GREEDY)


def test_responses_that_are_broken_off_are_sampled_again_and_counted(engine):
    sampling = SamplingSettings(max_new_tokens=100, ignore_eos=True)
    prompts = [PROMPTS[i % 6] for i in range(64)]
    before = engine.num_aborted
    undisturbed = [c.token_ids for c in ask(engine, prompts, sampling)]
    assert engine.num_aborted == before
    process = engine._process

    def abort_what_runs() -> None:
        while not process.manager.rid_to_state:
            time.sleep(0.001)
        time.sleep(0.02)  # until the scheduler has them; all of them take several times as long
        process._engine.loop.call_soon_threadsafe(process.manager.abort_request, "", True)

    thread = threading.Thread(target=abort_what_runs)
    thread.start()
    completions = ask(engine, prompts, sampling)
    thread.join()
    assert [c.token_ids for c in completions] == undisturbed
    assert {c.finish_reason for c in completions} == {"length"}
    assert 0 < engine.num_aborted - before <= 64


def test_four_thousand_requests_at_once_need_few_descriptors(engine):
    prompts = [(3 + i % 120, 40 + i % 7) for i in range(4096)]
    one = SamplingSettings(max_new_tokens=1, ignore_eos=True)
    child, mine = psutil.Process(engine.pids[0]), psutil.Process()
    limits = child.rlimit(psutil.RLIMIT_NOFILE), mine.rlimit(psutil.RLIMIT_NOFILE)
    assert max(child.num_fds(), mine.num_fds()) < 256
    try:
        child.rlimit(psutil.RLIMIT_NOFILE, (256, limits[0][1]))
        mine.rlimit(psutil.RLIMIT_NOFILE, (256, limits[1][1]))
        assert len(ask(engine, prompts, one)) == 4096
    finally:
        child.rlimit(psutil.RLIMIT_NOFILE, limits[0])
        mine.rlimit(psutil.RLIMIT_NOFILE, limits[1])


def own_bytes(process: psutil.Process) -> int:
    """Without the pages of files, which the kernel takes and gives back as it likes."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    sizes = dict(line.split(":", 1) for line in lines)
    return sum(1024 * int(sizes[key].split()[0]) for key in ("RssAnon", "RssShmem"))


def test_200_cycles_of_sleep_and_push_leave_memory_and_descriptors_flat(engine, tiny_weights):
    processes = [psutil.Process(), psutil.Process(engine.pids[0])]
    sampling = SamplingSettings(max_new_tokens=2, ignore_eos=True)

    def cycle() -> list[tuple[int, int]]:
        assert len(ask(engine, PROMPTS[:2], sampling)) == 2
        assert engine.sleep() == 0
        engine.wake()
        push_names(engine, tiny_weights, tiny_weights)
        return [(own_bytes(p), p.num_fds()) for p in processes]

    seen = [cycle() for _ in range(200)]
    for i in range(len(processes)):
        after_tenth = [cycle[i] for cycle in seen[10:]]
        growth = statistics.mean(own for own, _ in after_tenth[-20:]) - statistics.mean(
            own for own, _ in after_tenth[:20]
        )
        # Old garbage stays until Python looks for it, some 8 MiB later.
        assert growth < 16 * 2**20
        assert max(fds for _, fds in after_tenth) <= after_tenth[0][1] + 1


def test_after_sleep_the_engine_answers_only_once_weights_were_pushed(engine, tiny_weights):
    # At once after generating: SGLang's scheduler is not idle yet, and must not die of that.
    before = ask(engine, PROMPTS, GREEDY)
    engine.sleep()
    with pytest.raises(RuntimeError, match="the engine sleeps"):
        ask(engine, PROMPTS, GREEDY)
    with pytest.raises(RuntimeError, match="call wake"):
        push_names(engine, tiny_weights, tiny_weights)
    engine.wake()
    with pytest.raises(RuntimeError, match="weights were not pushed again"):
        ask(engine, PROMPTS, GREEDY)
    assert engine._asleep == {"kv_cache"}, "the cache's memory waits for the weights"
    push_names(engine, tiny_weights, tiny_weights)
    assert ask(engine, PROMPTS, GREEDY) == before


def test_a_request_inside_a_running_event_loop_is_answered(engine):
    import asyncio

    async def inside() -> list[Completion]:
        return ask(engine, PROMPTS, GREEDY)

    assert asyncio.run(inside()) == ask(engine, PROMPTS, GREEDY)


def test_the_trainers_signal_handlers_stay_while_the_engine_lives(engine):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("SIGTERM"))
    os.kill(os.getpid(), signal.SIGTERM)
    assert ask(engine, PROMPTS, GREEDY)
    signal.signal(signal.SIGTERM, before)
    assert seen == ["SIGTERM"]


def test_a_folder_without_model_is_a_model_error(tmp_path: Path):
    with pytest.raises(ModelError, match=r"has no config.json"):
        SGLangEngine(settings_for(tmp_path, tmp_path / "log"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "tpu"}, "device must be one of"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"max_running_requests": 0}, "max_running_requests must be at least 1, not 0"),
        ({"max_total_tokens": 50}, r"max_total_tokens \(50\) must hold .* \(320\)"),
    ],
)
def test_impossible_engine_settings_are_refused(tiny_model, change, message):
    options = {"context_length": CONTEXT, "device": "cpu", "dtype": "float32", **change}
    with pytest.raises(UserError, match=message):
        EngineSettings(model_path=tiny_model, log_file=Path("log"), **options)


def test_each_response_is_told_when_it_ends_and_not_with_the_last(engine):
    lengths = [300, 2, 160, 20, 80]  # far apart: several may end before one of them is told
    told: list[tuple[int, Completion, int]] = []
    sent_back = engine._process.manager.rid_to_state

    def on_finished(number: int, completion: Completion) -> None:
        told.append((number, completion, len(sent_back)))

    requests = [
        GenerationRequest(token_ids=p, seed=n, sampling=replace(FREE, max_new_tokens=length))
        for n, (p, length) in enumerate(zip(PROMPTS, lengths, strict=False))
    ]
    answers = engine.generate(requests, on_finished=on_finished)
    assert [number for number, _, _ in told] == [1, 3, 4, 2, 0]
    assert [completion for _, completion, _ in told] == [answers[n] for n in (1, 3, 4, 2, 0)]
    # Requests that SGLang still worked on when one of them was told.
    running = [count for _, _, count in told]
    assert running == sorted(running, reverse=True)
    assert running[0] > 0
    assert running[-1] == 0
    assert engine.generate(requests) == answers
