"""Files of a run that are not metrics: sampled responses, and events. Written by rank 0 alone.

One that cannot be written is told on the screen, and the run goes on.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from megappo.trainer.best_effort import BestEffort
from megappo.types import RolloutBatch

MOST_TOKENS_A_CHARACTER = 4
"""UTF-8 has at most four bytes a character, and a token at least one."""

EVENTS = "events.jsonl"


class Records:
    """Writes `rollouts/step_*.jsonl` and `events.jsonl` below a run's folder.

    Args:
        run_dir: the folder.
        rollouts_per_step: samples of rank 0 that are written; -1: all.
        tokens_per_sample: first tokens of each whose text and log-prob are written too.
        say: puts a line on the user's screen.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        rollouts_per_step: int,
        tokens_per_sample: int,
        say: Callable[[str], None],
    ) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / "rollouts"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._limit = rollouts_per_step
        self._tokens = tokens_per_sample
        self._best_effort = BestEffort(say)

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
        with self._best_effort.writing("rollouts/"):
            (self._folder / f"step_{step:06d}.jsonl").write_text("\n".join(lines) + "\n")

    def event(self, kind: str, step: int, **details: Any) -> None:
        """Appends an event with the time of day (Unix seconds)."""
        with self._best_effort.writing(EVENTS):
            self.append_event(self._run_dir, kind, step, **details)

    @staticmethod
    def append_event(run_dir: Path, kind: str, step: int, **details: Any) -> None:
        """The same, for a run whose records are not open, or in another thread's hands.

        A line that was cut off, by a kill or a full disk, keeps its own line.

        Raises:
            OSError: the disk is full, say.
        """
        line = json.dumps({"time": time.time(), "kind": kind, "step": step, **details}) + "\n"
        with (run_dir / EVENTS).open("ab+") as file:
            file.write(b"\n" * _is_torn(file) + line.encode())


def _is_torn(file: IO[bytes]) -> bool:
    """Whether a file's last line lacks its end."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read() != b"\n"


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
