"""The two engines beside each other: each is the other's oracle."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CONTEXT
from test_sglang_engine import PROMPTS, log_probs_of
from transformers import Qwen2ForCausalLM

from megappo.rollout.engine import GenerationRequest
from megappo.rollout.sampling import SamplingSettings

pytestmark = pytest.mark.engine

GREEDY = SamplingSettings(max_new_tokens=12, temperature=0.0, ignore_eos=True)


def by_megatron(
    model: Path, folder: Path, requests: list[GenerationRequest]
) -> list[dict[str, Any]]:
    asked, answered = folder / "requests.json", folder / "answers.json"
    asked.write_text(json.dumps([dataclasses.asdict(request) for request in requests]))
    worker = Path(__file__).parent / "megatron_worker.py"
    done = subprocess.run(
        [sys.executable, worker, model, str(CONTEXT), asked, answered],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(answered.read_text())


def endings(prompt: tuple[int, ...], answer: tuple[int, ...]) -> list[SamplingSettings]:
    """Settings that end this greedy answer in each way, some in two ways at one token."""
    text = "".join(chr(i - 3 + 32) for i in answer[4:6])
    before_the_end = dataclasses.replace(GREEDY, ignore_eos=False)
    changes: list[dict[str, Any]] = [
        {},
        {"stop_token_ids": (answer[5],)},
        {"stop": (text,)},
        {"stop": ("no such text", text), "stop_token_ids": (answer[5],)},
        {"stop_token_ids": (answer[3],), "max_new_tokens": answer.index(answer[3]) + 1},
        {"stop": (text,), "ignore_eos": True},
        {"stop_token_ids": (answer[2],), "ignore_eos": True},
    ]
    return [dataclasses.replace(before_the_end, **change) for change in changes]


def test_both_engines_give_the_same_greedy_answers_and_end_them_alike(
    engine, tiny_model: Path, tmp_path: Path
):
    def request(prompt, sampling, seed=0) -> GenerationRequest:
        return GenerationRequest(token_ids=prompt, seed=seed, sampling=sampling)

    requests = [request(prompt, GREEDY) for prompt in PROMPTS]
    full = engine.generate(requests)
    for prompt, answer in zip(PROMPTS, full, strict=True):
        if all(3 <= i < 98 for i in answer.token_ids[4:6]):  # characters, not marks
            requests += [request(prompt, s) for s in endings(prompt, answer.token_ids)]
    assert len(requests) > len(PROMPTS)
    greedy = engine.generate(requests)
    warm = [SamplingSettings(max_new_tokens=12, temperature=0.6, ignore_eos=True)]
    warm.append(dataclasses.replace(warm[0], temperature=1.3, top_p=0.8, top_k=20, min_p=0.02))
    sampled = [request(PROMPTS[i], s, seed=i) for i in range(6) for s in warm]
    sampled_by_sglang = [dataclasses.asdict(answer) for answer in engine.generate(sampled)]
    found = by_megatron(tiny_model, tmp_path, requests + sampled)
    for theirs, ours in zip(greedy, found, strict=False):
        assert tuple(ours["token_ids"]) == theirs.token_ids
        assert (ours["finish_reason"], ours["text"]) == (theirs.finish_reason, theirs.text)
        assert ours["log_probs"] == pytest.approx(theirs.log_probs, abs=1e-4)
    reasons = {
        (answer.finish_reason, bool(asked.sampling.stop) and asked.sampling.ignore_eos)
        for asked, answer in zip(requests, greedy, strict=True)
    }
    assert reasons == {("stop", False), ("length", False), ("stop", True)}
    model = Qwen2ForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    for asked, *both in zip(sampled, found[len(requests) :], sampled_by_sglang, strict=True):
        for answer in both:
            expected = log_probs_of(
                model, asked.token_ids, answer["token_ids"], temperature=asked.sampling.temperature
            )
            assert answer["log_probs"] == pytest.approx(expected.tolist(), abs=1e-4)
