"""How a response is sampled: settings, one seed a sample, and the tokens that end a response.

Left out: penalties, logit biases and grammars. They change the distribution that is sampled without
the trainer's log-probs knowing, so the PPO ratio would start away from 1.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.errors import ModelError, UserError

MAX_SAMPLES_PER_PROMPT = 1 << 16
"""Siblings that `sample_seed` keeps apart by construction."""

_TOP_K_ALL = -1


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How to sample one response; checked when built."""

    max_new_tokens: int
    """Response tokens, the end token included."""
    temperature: float = 1.0
    """Logits are divided by it. 0 is greedy, for validation; its log-probs are at temperature 1."""
    top_p: float = 1.0
    """Nucleus: the smallest set of tokens with at least this probability; 1 keeps all."""
    top_k: int = _TOP_K_ALL
    """The k likeliest tokens; -1 keeps all."""
    min_p: float = 0.0
    """Tokens with at least this share of the likeliest one's probability; 0 keeps all."""
    stop: tuple[str, ...] = ()
    """Strings that end the response; they stay in its token ids, and are cut from its text."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response, the last id then: pass `end_token_ids(model_folder)`."""
    ignore_eos: bool = False
    """Never stop before `max_new_tokens`; for measurements."""

    def __post_init__(self) -> None:
        rules = (
            (self.max_new_tokens >= 1, "max_new_tokens must be at least 1", self.max_new_tokens),
            (
                math.isfinite(self.temperature) and self.temperature >= 0,
                "temperature must be a finite number of at least 0",
                self.temperature,
            ),
            (0 < self.top_p <= 1, "top_p must be in (0, 1]", self.top_p),
            (
                self.top_k == _TOP_K_ALL or self.top_k >= 1,
                "top_k must be -1 (all tokens) or at least 1",
                self.top_k,
            ),
            (0 <= self.min_p < 1, "min_p must be in [0, 1)", self.min_p),
            (all(self.stop), "a stop string must not be empty", self.stop),
        )
        for holds, rule, value in rules:
            if not holds:
                raise UserError(f"{rule}, not {value!r}: correct the sampling settings")

    @property
    def truncates(self) -> bool:
        """Whether some tokens can never be drawn, so that log-probs are not those of the draw."""
        return self.top_p < 1 or self.top_k != _TOP_K_ALL or self.min_p > 0

    def to_sglang(self, *, seed: int) -> dict[str, Any]:
        """SGLang's `sampling_params` for one request; `sglang_min_p` makes `min_p` possible."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "stop": list(self.stop),
            "stop_token_ids": list(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "sampling_seed": seed,
        }


def sample_seed(seed: int, *, step: int, row: int, sample: int, salt: int = 0) -> int:
    """The seed of one response: the same in every run, layout and order of requests.

    The upper bits hash (seed, step, row), the lower 16 are the sample's number: siblings of one
    prompt differ by construction, others by chance (2^47 values).

    Args:
        seed: of the run.
        step: of training; the same prompt in another epoch is sampled anew.
        row: `Prompt.row`.
        sample: number of the response to this prompt, from 0.
        salt: of steps that are repeated and must not sample the same again; 0 leaves seeds alone.

    Returns:
        In [0, 2^63): SGLang keeps seeds as int64 on every device.
    """
    if not 0 <= sample < MAX_SAMPLES_PER_PROMPT:
        raise UserError(
            f"a prompt can have at most {MAX_SAMPLES_PER_PROMPT} responses, not sample {sample}: "
            "lower rollout.n"
        )
    text = f"{seed},{step},{row}" + (f",{salt}" if salt else "")
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 17) * MAX_SAMPLES_PER_PROMPT + sample


def end_token_ids(model_folder: str | Path) -> tuple[int, ...]:
    """Every token that ends a response of this model, ascending.

    Chat models often have several, and `generation_config.json` alone lists them all; then comes
    `config.json`, then the tokenizer's end token.

    Raises:
        ModelError: the folder names no end token.
    """
    folder = Path(model_folder)
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if file.exists():
            try:
                found = _as_ids(json.loads(file.read_text()).get("eos_token_id"))
            except (ValueError, AttributeError, TypeError) as error:
                raise ModelError(f"{file} cannot be read: {error!r}") from error
            if found:
                return found
    found = _tokenizer_end_token(folder)
    if not found:
        raise ModelError(
            f"{folder} names no end token, so no response would ever end: set eos_token_id in its "
            "generation_config.json"
        )
    return found


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(sorted({value} if isinstance(value, int) else set(value)))


def _tokenizer_end_token(folder: Path) -> tuple[int, ...]:
    # Imported here: reading two small JSON files must not cost an import of transformers.
    from transformers import AutoTokenizer

    if not (folder / "tokenizer_config.json").exists():
        return ()
    return _as_ids(AutoTokenizer.from_pretrained(folder).eos_token_id)
