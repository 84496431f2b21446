"""Random Llama models of given sizes as Hugging Face folders, for benchmarks of engines.

What they write is noise: benchmarks fix the number of tokens. The tokenizer knows single bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SHAPES: dict[str, dict[str, int]] = {
    "10M": {
        "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8192,
    },
    "135M": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    },
    "500M": {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 49152,
    },
}  # fmt: skip
"""Parameters, roughly -> config. 135M is SmolLM2's shape."""


def make_random_model(folder: Path, size: str) -> Path:
    """Writes a float32 model of `SHAPES[size]` with tied embeddings; returns the folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    _tokenizer().save_pretrained(folder)
    config = LlamaConfig(
        **SHAPES[size],
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *letters])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<pad>"))
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
