"""Curves of one metric of several runs as an SVG file: plot_runs.py OUT.svg METRIC NAME=RUN_DIR ...

No plotting package is needed: a curve is a polyline.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 640, 320, 40
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf")

Curve = Sequence[tuple[float, float]]
"""(step, value) by step"""


def read_curve(run_dir: Path, metric: str) -> Curve:
    """The steps of a run that have the metric."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row[metric]) for row in rows if metric in row]


def svg(curves: Mapping[str, Curve], title: str) -> str:
    """A picture with a line and a legend entry for each curve; axes begin at 0."""
    last = max(step for curve in curves.values() for step, _ in curve)
    top = max(1.0, *(value for curve in curves.values() for _, value in curve))

    def place(step: float, value: float) -> str:
        x = MARGIN + step / last * (WIDTH - 2 * MARGIN)
        y = HEIGHT - MARGIN - max(value, 0.0) / top * (HEIGHT - 2 * MARGIN)
        return f"{x:.1f},{y:.1f}"

    corner, right, up = place(0, 0), place(last, 0), place(0, top)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<polyline points="{up} {corner} {right}" fill="none" stroke="#444"/>',
        f'<text x="{WIDTH / 2}" y="20" text-anchor="middle">{title}</text>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">step (0 to {last:g})</text>',
        f'<text x="8" y="{MARGIN + 4}">{top:g}</text>',
        f'<text x="8" y="{HEIGHT - MARGIN + 4}">0</text>',
    ]
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(place(step, value) for step, value in curve)
        y = HEIGHT - MARGIN - 16 * (len(curves) - number)
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
            f'<text x="{WIDTH - MARGIN - 120}" y="{y}" fill="{colour}">{name}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def main(arguments: Sequence[str]) -> int:
    """Writes the picture; returns the exit code."""
    if len(arguments) < 3 or any("=" not in run for run in arguments[2:]):
        sys.stderr.write(f"usage: {__doc__.splitlines()[0].partition(': ')[2]}\n")
        return 2
    out, metric, *runs = arguments
    curves = {}
    for run in runs:
        name, _, folder = run.partition("=")
        try:
            curves[name] = read_curve(Path(folder), metric)
        except OSError as error:
            sys.stderr.write(f"error: {error}\n")
            return 2
        if not curves[name]:
            sys.stderr.write(f"error: no step of {folder} has {metric}\n")
            return 2
    Path(out).write_text(svg(curves, metric))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
