"""Files of a run that are not metrics: sampled responses, and events. Written by rank 0 alone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from megappo.types import RolloutBatch


class Records:
    """Writes `rollouts/step_*.jsonl` and `events.jsonl` below a run's folder."""

    def __init__(self, run_dir: Path, *, rollouts_per_step: int) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / "rollouts"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._limit = rollouts_per_step

    def write_rollouts(self, step: int, batch: RolloutBatch, tokenizer: Any) -> None:
        """The first samples of rank 0's share, one JSON object a sample."""
        count = len(batch) if self._limit < 0 else min(self._limit, len(batch))
        if not count:
            return
        assert batch.scores is not None
        lines = []
        for b in range(count):
            prompt, completion = batch.prompts[b], batch.completions[b]
            sample = {
                "row": prompt.row,
                "prompt": tokenizer.decode(list(prompt.token_ids)),
                "response": completion.text,
                "score": batch.scores[b].item(),
                "ground_truth": prompt.ground_truth,
                "data_source": prompt.data_source,
                "finish_reason": completion.finish_reason,
                "response_tokens": len(completion.token_ids),
            }
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
