"""The log of `tools/chaos.py`: a JSON line a kill and one a run, and the tables made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.kills.moments import MOMENTS

VICTIMS = ("rank", "launcher", "all", "engine")


@dataclass(kw_only=True)
class Kill:
    """One line of the log."""

    layout: str
    run: str
    victim: str
    moment: str
    step: int
    """worked on when it came"""
    phase: str
    """that `status.json` told right after it"""
    hit: bool = False
    """whether what is left of the run shows that it came in its moment"""
    exit_code: int | None = None
    """of the launcher; None after the kill of an engine, which the run outlives"""
    gone_s: float = 0.0
    """to the end of the last process"""
    problems: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Run:
    """A line of the log: one run from its first start to its end."""

    layout: str
    run: str
    starts: int = 0
    kills: int = 0
    seconds: float = 0.0
    temporary: list[str] = field(default_factory=list)
    """what killed processes have left in the temporary folder and in shared memory"""
    problems: list[str] = field(default_factory=list)


class Log:
    """JSON lines, one a kill and one a run, so that half a session counts too."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.lines: list[dict[str, Any]] = []

    def add(self, kind: str, line: Kill | Run) -> None:
        """Keeps a line, appends it to the file and shows it."""
        found = {"kind": kind, **asdict(line)}
        self.lines.append(found)
        print(json.dumps(found), flush=True)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(found) + "\n")


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Kills by victim and moment in Markdown: `hits / kills`; then what the runs came to."""
    kills = [line for line in lines if line["kind"] == "kill"]
    runs = [line for line in lines if line["kind"] == "run"]
    rows = ["| moment | " + " | ".join(VICTIMS) + " |", "|---|" + "---|" * len(VICTIMS)]
    for moment in MOMENTS:
        cells = []
        for victim in VICTIMS:
            found = [k for k in kills if (k["victim"], k["moment"]) == (victim, moment)]
            cells.append(f"{sum(k['hit'] for k in found)} / {len(found)}" if found else "")
        rows.append(f"| {moment} | " + " | ".join(cells) + " |")
    rows += ["", "| layout | runs | starts | kills | in their moment | slowest end | equal |"]
    rows.append("|---|---|---|---|---|---|---|")
    for name in dict.fromkeys(line["layout"] for line in lines):
        of_layout = [k for k in kills if k["layout"] == name]
        lives = [r for r in runs if r["layout"] == name]
        problems = [p for line in (*of_layout, *lives) for p in line["problems"]]
        rows.append(
            f"| {name} | {len(lives)} | {sum(r['starts'] for r in lives)} | {len(of_layout)} "
            f"| {sum(k['hit'] for k in of_layout)} "
            f"| {max((k['gone_s'] for k in of_layout), default=0.0):.0f} s "
            f"| {'NO: ' + '; '.join(problems)[:300] if problems else 'yes'} |"
        )
    return "\n".join(rows)


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The lines of several logs."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]
