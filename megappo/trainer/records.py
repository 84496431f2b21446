"""Files of a run that are not metrics: sampled responses, and events. Written by rank 0 alone."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megappo.types import RolloutBatch

MOST_TOKENS_A_CHARACTER = 4
"""UTF-8 has at most four bytes a character, and a token at least one."""


class Records:
    """Writes `rollouts/step_*.jsonl` and `events.jsonl` below a run's folder.

    Args:
        run_dir: the folder.
        rollouts_per_step: samples of rank 0 that are written; -1: all.
        tokens_per_sample: first tokens of each whose text and log-prob are written too.
    """

    def __init__(self, run_dir: Path, *, rollouts_per_step: int, tokens_per_sample: int) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / "rollouts"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._limit = rollouts_per_step
        self._tokens = tokens_per_sample

    def write_rollouts(self, step: int, batch: RolloutBatch, tokenizer: Any) -> None:
        """The first samples of rank 0's share, one JSON object a sample."""
        count = len(batch) if self._limit < 0 else min(self._limit, len(batch))
        if not count:
            return
        assert batch.scores is not None
        lines, scored = [], batch.is_scored.tolist()
        for b in range(count):
            prompt, completion = batch.prompts[b], batch.completions[b]
            sample = {
                "row": prompt.row,
                "prompt": tokenizer.decode(list(prompt.token_ids)),
                "response": completion.text,
                "score": batch.scores[b].item() if scored[b] else None,  # its reward failed
                "ground_truth": prompt.ground_truth,
                "data_source": prompt.data_source,
                "finish_reason": completion.finish_reason,
                "response_tokens": len(completion.token_ids),
            }
            if self._tokens:
                sample["tokens"] = token_texts(completion.token_ids[: self._tokens], tokenizer)
                sample["log_probs"] = [round(p, 4) for p in completion.log_probs[: self._tokens]]
            lines.append(json.dumps(sample, ensure_ascii=False))
        (self._folder / f"step_{step:06d}.jsonl").write_text("\n".join(lines) + "\n")

    def event(self, kind: str, step: int, **details: Any) -> None:
        """Appends an event with the time of day (Unix seconds)."""
        self.append_event(self._run_dir, kind, step, **details)

    @staticmethod
    def append_event(run_dir: Path, kind: str, step: int, **details: Any) -> None:
        """The same, for a run whose records are not open, or in another thread's hands."""
        line = json.dumps({"time": time.time(), "kind": kind, "step": step, **details})
        with (run_dir / "events.jsonl").open("a") as file:
            file.write(line + "\n")


def token_texts(token_ids: Sequence[int], tokenizer: Any) -> list[str]:
    """The text of each token, special ones included, so that all of them joined are the response.

    A character that is spread over several tokens stands at the last of them. Each token is decoded
    behind the one before it: alone, tokenizers of the SentencePiece kind would drop its space.
    """

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        return text

    texts: list[str] = []
    before: list[int] = []
    waiting: list[int] = []
    for token in token_ids:
        waiting.append(token)
        text = decode([*before, *waiting])[len(decode(before)) if before else 0 :]
        if text.endswith("\ufffd") and len(waiting) < MOST_TOKENS_A_CHARACTER:
            texts.append("")
            continue
        texts.append(text)
        before, waiting = waiting, []
    if waiting:  # cut within a character
        texts[-1] = decode(waiting)
    return texts
