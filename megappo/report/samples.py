"""Samples of a run for its report: some of what `rollouts/` holds, and how all of it is spread.

Bounded: at most `HISTOGRAM_STEPS` files are read a run, one at a time, of which two numbers a
sample are kept; `most` samples are taken along with cut texts. Files of steps that are not in the
metrics are left over from before a resume, and are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.report.lines import read_lines, spread
from megappo.report.run_folder import RunFolder

HISTOGRAM_STEPS = 400
SAMPLE_STEPS = 100
NUM_BINS = 24
PROMPT_CHARS, RESPONSE_CHARS, TRUTH_CHARS = 4000, 8000, 300
MOST_TOKENS = 1024

_COUNTED = ("score", "response_tokens")
_KEYS = ("row", "score", "data_source", "finish_reason", "response_tokens")


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Of one run, as JSON values."""

    shown: list[dict[str, Any]]
    histograms: dict[str, Any]
    """`score` and `response_tokens`: edges [bins + 1], steps, share [steps][bins]"""
    num_read: int


def read_samples(run: RunFolder, *, most: int) -> Samples:
    """Takes samples of evenly spaced steps, the first of each; adds to `run.notes`."""
    files = _files(run)
    some = spread(files, HISTOGRAM_STEPS)
    if len(some) < len(files):
        run.notes.append(f"distributions are of {len(some)} of {len(files)} steps with samples")
    paths = dict(some)
    by_step, num_failed = {}, 0
    for step, path in paths.items():
        rows = read_lines(path, run.notes)
        by_step[step] = _numbers(_scored(rows))
        num_failed += sum("score" in row and row["score"] is None for row in rows)
    if num_failed:
        run.notes.append(f"{num_failed} samples are left out, as their reward failed")
    num_read = sum(len(rows) for rows in by_step.values())
    steps = spread([s for s, _ in some if by_step[s]], SAMPLE_STEPS)
    shown = [
        _shown(step, row)
        for step in steps
        for row in _scored(read_lines(paths[step], []))[: max(1, most // max(1, len(steps)))]
    ][:most]
    if len(shown) < num_read:
        run.notes.append(
            f"{len(shown)} samples of {len(steps)} steps are shown, of {num_read} that were read; "
            "all are in rollouts/"
        )
    histograms = {name: histogram(by_step, name) for name in _COUNTED if num_read}
    return Samples(shown=shown, histograms=histograms, num_read=num_read)


def _files(run: RunFolder) -> list[tuple[int, Path]]:
    last = run.steps[-1] if run.steps else -1
    found, stale = [], 0
    for path in sorted((run.path / "rollouts").glob("step_*.jsonl")):
        if (match := re.fullmatch(r"step_(\d+)", path.stem)) is None:
            continue
        if (step := int(match[1])) > last:
            stale += 1
        else:
            found.append((step, path))
    if stale:
        run.notes.append(f"{stale} files of samples are of steps that metrics.jsonl does not have")
    return sorted(found)


def _scored(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those with a score and a length that are numbers."""
    return [r for r in rows if _is_number(r.get("score")) and _is_number(r.get("response_tokens"))]


def _numbers(rows: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """What distributions are of."""
    return [{name: row[name] for name in _COUNTED} for row in rows]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _shown(step: int, row: Mapping[str, Any]) -> dict[str, Any]:
    tokens, log_probs = row.get("tokens") or [], row.get("log_probs") or []
    count = min(len(tokens), len(log_probs), MOST_TOKENS)
    return {
        "step": step,
        **{key: row.get(key) for key in _KEYS},
        "prompt": _tail(str(row.get("prompt", "")), PROMPT_CHARS),
        "response": _head(str(row.get("response", "")), RESPONSE_CHARS),
        "ground_truth": _head(str(row.get("ground_truth", "")), TRUTH_CHARS),
        "tokens": [str(token) for token in tokens[:count]],
        "log_probs": [p if _is_number(p) else None for p in log_probs[:count]],
    }


def _head(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + f" [{len(text) - most} more characters]"


def _tail(text: str, most: int) -> str:
    return text if len(text) <= most else f"[{len(text) - most} characters before] " + text[-most:]


def histogram(by_step: Mapping[int, Sequence[Mapping[str, Any]]], name: str) -> dict[str, Any]:
    """Shares of a step's samples in `NUM_BINS` equal bins between the run's extremes."""
    values = [float(row[name]) for rows in by_step.values() for row in rows]
    low, high = min(values), max(values)
    width = (high - low) / NUM_BINS or 1.0
    shares = []
    steps = [step for step, rows in by_step.items() if rows]
    for step in steps:
        counts = [0] * NUM_BINS
        for row in by_step[step]:
            counts[min(NUM_BINS - 1, int((float(row[name]) - low) / width))] += 1
        shares.append([round(count / len(by_step[step]), 4) for count in counts])
    edges = [low + width * i for i in range(NUM_BINS + 1)]
    return {"steps": steps, "edges": [float(f"{edge:.6g}") for edge in edges], "shares": shares}
