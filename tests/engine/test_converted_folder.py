"""A folder that went through a Megatron checkpoint serves in SGLang as the one it came from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import settings_for
from test_sglang_engine import GREEDY, PROMPTS, ask, assert_parity, greedy_tokens
from transformers import Qwen2ForCausalLM

from megappo.cli import main
from megappo.rollout.sglang_engine import SGLangEngine

pytestmark = pytest.mark.engine


def test_an_exported_folder_answers_as_the_model_it_came_from(tiny_model: Path, tmp_path: Path):
    checkpoint, exported = tmp_path / "checkpoint", tmp_path / "exported"
    assert main(["convert", "to-megatron", str(tiny_model), str(checkpoint)]) == 0
    like = ["--like", str(tiny_model), "--max-file-size", "50K"]
    assert main(["convert", "to-hf", str(checkpoint), str(exported), *like]) == 0
    original = Qwen2ForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with SGLangEngine(settings_for(exported, tmp_path / "engine.log")) as engine:
        completions = ask(engine, PROMPTS, GREEDY)
    assert [c.token_ids for c in completions] == [greedy_tokens(original, p, 12) for p in PROMPTS]
    assert_parity(original, completions)
