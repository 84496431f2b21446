"""Prints what the runs of tools/rlhf_demo.sh have come to, and fails if it is too little.

python tools/rlhf_check.py SFT_RUN RM_RUN PPO_RUN

Exit codes: 0 enough, 1 too little, 2 a run has not written what is looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megappo.loggers.jsonl import read_jsonl

LEAST_ACCURACY = 0.9
"""The share of validation pairs in the right order must be over it."""

LEAST_RISE = 0.5
"""Of the reward of sampled answers; the standard error of a step's mean of 256 is about 0.12."""

LAST_STEPS = 3
"""Steps whose mean is the reward at the end."""


def series(run: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) wherever the metric was written.

    Raises:
        ValueError: the run has no such number, or one that is not finite (null in the file).
    """
    path = run / "metrics.jsonl"
    rows = read_jsonl(path) if path.is_file() else []
    found = [(int(str(row["step"])), row[name]) for row in rows if name in row]
    values = [(step, float(value)) for step, value in found if isinstance(value, int | float)]
    if not values or len(values) < len(found):
        raise ValueError(
            f"{path} must have {name}, finite at every step that has it, but {len(values)} of "
            f"{len(found)} are; remove {run} and run tools/rlhf_demo.sh again"
        )
    return values


def shown(text: str, values: Sequence[tuple[int, float]]) -> None:
    """One line: the first value and the last."""
    (first, before), (last, after) = values[0], values[-1]
    print(f"{text}: {before:.3f} (step {first}) -> {after:.3f} (step {last})")


def check(sft: Path, rm: Path, ppo: Path) -> list[str]:
    """Prints the figures of the three runs; returns what is too little about them."""
    accuracy, reward = series(rm, "val/accuracy"), series(ppo, "reward/model/mean")
    shown("fine-tuning: loss of validation answers, nats a token", series(sft, "val/loss"))
    shown("reward model: validation pairs in the right order", accuracy)
    shown("reward model: mean lead of the better answer", series(rm, "val/margin"))
    shown("PPO: reward of sampled answers", reward)
    shown("PPO: reward of greedy validation answers", series(ppo, "val/reward_model/mean"))
    shown("PPO: right among sampled answers, which no reward looked at",
          series(ppo, "reward/rules/mean"))  # fmt: skip
    shown("PPO: right among greedy validation answers", series(ppo, "val/score/mean"))
    at_end = [value for _, value in reward[1:][-LAST_STEPS:]] or [reward[0][1]]
    rise = sum(at_end) / len(at_end) - reward[0][1]
    wanted = {
        f"the reward model's accuracy must be over {LEAST_ACCURACY}, but is "
        f"{accuracy[-1][1]:.3f}": accuracy[-1][1] > LEAST_ACCURACY,
        f"the policy's reward must rise by over {LEAST_RISE} from step 1 to the mean of the last "
        f"{LAST_STEPS}, but rose by {rise:.3f}": rise > LEAST_RISE,
    }
    return [text for text, enough in wanted.items() if not enough]


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    if len(arguments) != 3:
        print("usage: rlhf_check.py SFT_RUN RM_RUN PPO_RUN", file=sys.stderr)
        return 2
    try:
        missed = check(*map(Path, arguments))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for text in missed:
        print(f"too little: {text}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
