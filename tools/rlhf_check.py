"""Prints what the runs of tools/rlhf_demo.sh have come to, and fails if it is too little.

python tools/rlhf_check.py RUNS_DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

from megappo.loggers.jsonl import read_jsonl

LEAST_ACCURACY = 0.9


def series(run: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) wherever the metric was written."""
    rows = read_jsonl(run / "metrics.jsonl")
    return [(int(str(row["step"])), float(str(row[name]))) for row in rows if name in row]


def main(runs: Path) -> int:
    """Exit code: 0 if the reward model is right often enough and the policy's reward has risen."""
    shown = {
        "fine-tuning: loss of validation answers, nats a token": (runs / "sft", "val/loss"),
        "reward model: validation pairs in the right order": (runs / "rm", "val/accuracy"),
        "reward model: mean lead of the better answer": (runs / "rm", "val/margin"),
        "PPO: reward of sampled answers": (runs / "rlhf_ppo", "reward/model/mean"),
        "PPO: reward of greedy validation answers": (runs / "rlhf_ppo", "val/reward_model/mean"),
        "PPO: right validation answers, which no reward looked at": (
            runs / "rlhf_ppo", "val/score/mean"
        ),
    }  # fmt: skip
    found = {text: series(*where) for text, where in shown.items()}
    for text, values in found.items():
        (first, before), (last, after) = values[0], values[-1]
        print(f"{text}: {before:.3f} (step {first}) -> {after:.3f} (step {last})")
    accuracy = found["reward model: validation pairs in the right order"][-1][1]
    rewards = [value for _, value in found["PPO: reward of sampled answers"]]
    rises = rewards[-1] > rewards[0]
    if accuracy <= LEAST_ACCURACY:
        print(f"too little: the reward model's accuracy {accuracy:.3f} is not over 0.9")
    if not rises:
        print(f"too little: the policy's reward did not rise from {rewards[0]:.3f}")
    return 0 if accuracy > LEAST_ACCURACY and rises else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
