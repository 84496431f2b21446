"""A tiny random Qwen2 with a tokenizer of single characters, and one engine for all tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from megappo.rollout.sglang_engine import SGLangEngine
from megappo.rollout.sglang_settings import EngineSettings
from megappo.types import Prompt

VOCABULARY = 128
CONTEXT = 320


def make_tiny_model(folder: Path, *, seed: int = 0) -> Path:
    characters = [chr(code) for code in range(32, 127)]
    names = ["<pad>", "<eos>", "<end>", *characters]
    names += [f"<unused{i}>" for i in range(VOCABULARY - len(names))]
    tokenizer = Tokenizer(
        models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], unk_token="<pad>")
    )
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
            tie_word_embeddings=False,
        )
    ).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.15) if parameter.dim() > 1 else None
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    return folder


def settings_for(model: Path, log_file: Path, **changes: object) -> EngineSettings:
    return EngineSettings(
        model_path=model,
        log_file=log_file,
        context_length=CONTEXT,
        device="cpu",
        dtype="float32",
        **changes,
    )


def prompt_of_row(row: int) -> Prompt:
    return Prompt(
        row=row,
        token_ids=(40 + row, 70, 51),
        data_source="test",
        ground_truth="",
        extra_info={},
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_weights(tiny_model: Path) -> dict[str, torch.Tensor]:
    return load_file(tiny_model / "model.safetensors")


@pytest.fixture(scope="session")
def shared_engine(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangEngine]:
    log_file = tmp_path_factory.mktemp("logs") / "engine.log"
    with SGLangEngine(settings_for(tiny_model, log_file)) as engine:
        yield engine


@pytest.fixture
def engine(
    shared_engine: SGLangEngine, tiny_weights: dict[str, torch.Tensor]
) -> Iterator[SGLangEngine]:
    """The shared engine; it has the folder's weights again after each test."""
    version = shared_engine.weight_version
    yield shared_engine
    if shared_engine.weight_version != version or shared_engine._unusable is not None:
        shared_engine.wake()
        shared_engine.update_weights(
            tiny_weights.items(), expected_names=set(tiny_weights), version=version + 1
        )
