"""Puts runs into one HTML file: the page's own files, the chart library, and the data as JSON.

The library is plotly.js as the installed package `plotly` carries it. Nothing is loaded when the
page is opened, which its content security policy forbids too. Texts of runs reach the page as JSON
alone, with no `<` in it, and become text nodes there, so a sample cannot break out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import megappo
from megappo.errors import UserError
from megappo.report.run_folder import RunFolder, read_run
from megappo.report.samples import Samples, read_samples

MOST_SAMPLES = 3000
"""In a page, shared out evenly over its runs."""


def write_report(folders: Sequence[Path], output: Path) -> list[str]:
    """Writes the page; returns what it leaves out, a line each.

    Raises:
        UserError: a folder is no run's, or the chart library is missing.
    """
    runs = [read_run(folder) for folder in folders]
    _name_apart(runs)
    library = _library()
    samples = [read_samples(run, most=MOST_SAMPLES // len(runs)) for run in runs]
    page = _fill(
        _own("page.html"),
        {
            "TITLE": _escaped(", ".join(run.name for run in runs)),
            "STYLE": _own("page.css"),
            "LIBRARY": library,
            "DATA": embed(_data(runs, samples)),
            "PROGRAM": _own("charts.js") + _own("samples.js"),
        },
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    new = output.with_name(output.name + ".new")
    new.write_text(page, encoding="utf-8")
    new.replace(output)
    several = len(runs) > 1
    return [f"{run.name}: {note}" if several else note for run in runs for note in run.notes]


def _name_apart(runs: Sequence[RunFolder]) -> None:
    """Runs whose folders have one name are called by their paths."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.path)


def _data(runs: Sequence[RunFolder], samples: Sequence[Samples]) -> dict[str, Any]:
    return {
        "made": time.strftime("%Y-%m-%d %H:%M:%S"),
        "version": megappo.__version__,
        "runs": [
            {
                "name": run.name,
                "path": str(run.path),
                "state": run.state,
                "notes": run.notes,
                "steps": run.steps,
                "metrics": run.metrics,
                "events": run.events,
                "samples": found.shown,
                "histograms": found.histograms,
                "num_read": found.num_read,
            }
            for run, found in zip(runs, samples, strict=True)
        ],
    }


def embed(data: Any) -> str:
    """JSON that can stand in a `<script>` element whatever texts it holds."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _fill(template: str, parts: dict[str, str]) -> str:
    """Puts each part in the place of its `%%NAME%%`, in one pass: parts may hold anything."""
    pieces = template.split("%%")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _own(name: str) -> str:
    return resources.files("megappo.report").joinpath(name).read_text(encoding="utf-8")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _library() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UserError(
            "the package plotly, whose charts the report uses, is not installed: pip install plotly"
        ) from error
    library: str = get_plotlyjs()
    return library
