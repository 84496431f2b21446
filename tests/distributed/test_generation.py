"""The in-process engine against transformers: tokens and log-probs, at TP 1 and 2, packed waves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import run_ranks
from tests.distributed.tiny_models import MODELS, MOE_MODELS, save_tiny_model, sequences

pytestmark = pytest.mark.distributed

NEW = 9

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp1": (1, ()),
    "tp2": (2, ("--tp", "2")),
    "tp2_sp": (2, ("--tp", "2", "--sp")),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("dense"), MODELS)


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("with_experts"), MOE_MODELS)


def saved(root: Path, models: dict[str, dict[str, Any]]) -> Path:
    for name, settings in models.items():
        save_tiny_model(root / name, settings)
    return root


def generate(models: Path, out: Path, layout: str) -> dict[str, dict[str, Any]]:
    """What all ranks answered: by model, then by run, then by request number."""
    ranks, flags = LAYOUTS[layout]
    run_ranks(
        "generation.py", ranks, "--models", str(models), "--out", str(out),
        "--new", str(NEW), *flags,
    )  # fmt: skip
    first, *others = (json.loads((out / f"rank_{r}.json").read_text()) for r in range(ranks))
    for other in others:
        for name, runs in other.items():
            for run, answers in runs.items():
                if isinstance(answers, dict):
                    assert not first[name][run].keys() & answers.keys()
                    first[name][run] |= answers
                else:
                    assert first[name][run] == answers
    return first


def tokens(answers: dict[str, Any]) -> dict[str, list[int]]:
    return {number: answer["token_ids"] for number, answer in answers.items()}


def assert_equals_transformers(model: Any, answers: dict[str, Any]) -> None:
    assert sorted(answers) == ["0", "1", "2", "3", "4"]
    for number, answer in answers.items():
        prompt = sequences()[int(number)][None]
        generated = model.generate(
            prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
            eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        ids = generated.sequences[0, prompt.shape[1] :]
        assert answer["token_ids"] == ids.tolist()
        log_probs = torch.cat(generated.logits).log_softmax(-1).gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor(answer["log_probs"]), log_probs, atol=1e-4, rtol=0, check_dtype=False
        )
        assert answer["finish_reason"] == "length"
        assert answer["text"] == "".join(f"w{i} " for i in ids.tolist() if i != 1)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("dense", "tp1"), ("dense", "tp2"), ("with_experts", "tp1"), ("with_experts", "tp2_sp")],
)
def test_the_engine_writes_what_transformers_writes_and_leaves_the_model_as_it_was(
    request, kind, layout, tmp_path
):
    from transformers import AutoModelForCausalLM

    models = request.getfixturevalue(kind)
    for name, runs in generate(models, tmp_path, layout).items():
        model = AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32)
        assert_equals_transformers(model, runs["greedy"])
        assert tokens(runs["top_k"]) == tokens(runs["greedy"])
        assert tokens(runs["one_rank_asks_nothing"]) == {"0": tokens(runs["greedy"])["0"]}
        sampled = tokens(runs["sampled"])
        assert tokens(runs["sampled_in_another_order"]) == sampled
        smaller = tokens(runs["sampled_in_a_smaller_batch"])
        assert smaller == {number: sampled[number] for number in ("8", "4")}
        assert sampled["0"] != sampled["5"], "one prompt, two seeds"
        assert "7 prompt tokens and max_new_tokens 58 exceed context_length 64" in runs["refused"]
        assert runs["unchanged"]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
        assert runs["version"] == 7
        assert_equals_transformers(model, runs["greedy_after_a_change"])
