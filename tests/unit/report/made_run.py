"""A run's folder as a run leaves it, made by hand: 12 steps, a guard's event, texts that bite."""

import json
import math
from pathlib import Path

EVIL = (
    "</script><script>document.title = 'bad'</script><img src=x onerror=alert(1)> <b>&amp; \u2028"
)


def metrics(step: int, *, shift: float = 0.0) -> dict[str, float | None]:
    return {
        "critic/score/mean": 0.1 * step + shift,
        "actor/ppo_kl": 0.01 * math.sin(step),
        "actor/grad_norm": None if step == 5 else 1.0,
        "rollout/log_prob_diff_mean": 1e-6 * step,
        "response_length/mean": 4.0 + step,
        "timing_s/generate": 1.0,
        "timing_s/update_actor": 2.0,
        "timing_s/step": 3.0,
    }


def sample(step: int, i: int) -> dict[str, object]:
    text = EVIL if i == 3 else f"answer {i} of step {step}"
    return {
        "row": i, "prompt": f"question {i} {EVIL if i == 3 else ''}", "response": text,
        "score": float(i % 2), "ground_truth": "7", "data_source": "sums" if i < 3 else "words",
        "finish_reason": "stop", "response_tokens": 3, "tokens": [text[:5], text[5:], "<end>"],
        "log_probs": [-0.5, -4.0, 0.0],
    }  # fmt: skip


def make(folder: Path, *, steps: int = 12, shift: float = 0.0) -> Path:
    """Writes metrics, events, samples and a status; returns the folder."""
    (folder / "rollouts").mkdir(parents=True)
    rows = [{"step": step, **metrics(step, shift=shift)} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = [
        {"time": 1.0, "kind": "pushed", "step": 0, "rollout/sync_gb": 0.5},
        {"time": 2.0, "kind": "guard", "step": 4, "rule": "kl", "action": "lower_lr",
         "reason": "actor/ppo_kl was 0.3", "done": f"rate 1e-6 {EVIL}", "detail": ""},
        {"time": 3.0, "kind": "saved", "step": 6, "path": "p"},
    ]  # fmt: skip
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for step in range(1, steps + 1):
        lines = [json.dumps(sample(step, i)) for i in range(6)]
        name = f"step_{step:06d}.jsonl"
        (folder / "rollouts" / name).write_text("\n".join(lines) + "\n")
    status = {"step": steps, "phase": "done", "since": 5.0}
    (folder / "status.json").write_text(json.dumps(status))
    return folder
