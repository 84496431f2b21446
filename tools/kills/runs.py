"""Runs of the command line that are watched from outside: start, phase, processes, leftovers.

Nothing of the run is patched: what it does at a moment is read from its `status.json`, its
processes from the system. A marker in the environment, which all descendants inherit, finds those
that outlive their run, whoever their parent is by then.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

MARKER = "MEGAPPO_KILLED_RUN"
POLL_S = 0.002
VARIABLE = (
    "timing_s/", "perf/", "reward/overlap", "rollout/sync_", "rollout/engine_restarts",
    "rollout/aborted",
)  # fmt: skip
"""Beginnings of metrics that depend on the clock, the machine or the kills themselves."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which model is trained on how many ranks."""

    ranks: int
    overrides: tuple[str, ...] = ()
    family: str = "qwen2"


class WatchedRun:
    """One run, started as a user starts it."""

    def __init__(
        self,
        config: Path,
        run_dir: Path,
        layout: Layout,
        overrides: Sequence[str] = (),
        *,
        niceness: int = 0,
    ) -> None:
        """Starts it; screen and temporary files are `<run_dir>.screen` and `<run_dir>.tmp`."""
        self.run_dir = run_dir
        self.screen_file = run_dir.with_suffix(".screen")
        self.temporary = run_dir.with_suffix(".tmp")
        self.temporary.mkdir(parents=True, exist_ok=True)
        self._shared_memory: set[Path] = set()
        self._num_ranks = layout.ranks
        self._rank_pids: list[int] = []
        self._ended = threading.Event()
        environment = os.environ | {
            MARKER: str(run_dir),
            "TMPDIR": str(self.temporary),
            "OMP_NUM_THREADS": "1",
        }
        self._started = time.time()
        with self.screen_file.open("w") as screen:
            self.launcher = subprocess.Popen(
                [
                    *("nice", "-n", str(niceness)),
                    *(sys.executable, "-m", "megappo.launch"),
                    *("--nproc-per-node", str(layout.ranks), str(config)),
                    *(f"trainer.run_dir={run_dir}", *layout.overrides, *overrides),
                ],
                stdout=screen,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
        atexit.register(self.end)
        threading.Thread(target=self._note_shared_memory, daemon=True).start()

    @property
    def screen(self) -> str:
        """What a user sees of it."""
        return self.screen_file.read_text()

    @property
    def runs(self) -> bool:
        """Whether the launcher has not ended."""
        return self.launcher.poll() is None

    def status(self) -> tuple[int, str]:
        """Step and phase that the run is in; (0, "start") before the first of this start."""
        path = self.run_dir / "status.json"
        if not path.exists():
            return 0, "start"
        found = json.loads(path.read_text())
        if found["since"] < self._started:
            return 0, "start"
        return found["step"], found["phase"]

    def ranks(self) -> list[psutil.Process]:
        """The ranks' processes, in order of their start."""
        children = psutil.Process(self.launcher.pid).children()
        return sorted((c for c in children if _runs_trainer(c)), key=lambda c: c.pid)

    def rank_pids(self) -> list[int]:
        """Of the ranks that have been started, rank 0 first; kept once they are all there."""
        if len(self._rank_pids) < self._num_ranks and self.runs:
            self._rank_pids = [rank.pid for rank in self.ranks()]
        return list(self._rank_pids)

    def engines(self) -> list[list[psutil.Process]]:
        """The processes of each engine that is up or starts."""
        found = [
            [c for c in rank.children(recursive=True) if _is_engine(c)] for rank in self.ranks()
        ]
        return [engine for engine in found if engine]

    def survivors(self) -> list[psutil.Process]:
        """All processes of this run that are there, whoever their parent is."""
        found = []
        for process in psutil.process_iter():
            try:
                marked = process.environ().get(MARKER) == str(self.run_dir)
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:  # it ended meanwhile, or is somebody else's
                continue
        return found

    def wait(self, timeout_s: float) -> int:
        """The launcher's exit code."""
        return self.launcher.wait(timeout=timeout_s)

    def wait_until_gone(self, timeout_s: float) -> list[psutil.Process]:
        """Waits for the last process; returns those that are still there after the time limit."""
        deadline = time.monotonic() + timeout_s
        while (left := self.survivors()) and time.monotonic() < deadline:
            self.launcher.poll()  # reaps it
            time.sleep(0.1)
        return left

    def _note_shared_memory(self) -> None:
        """The thread: remembers the files in shared memory that the run's processes use."""
        while not self._ended.wait(1.0):
            for process in self.survivors():
                try:
                    maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                    continue
                paths = [line.split(maxsplit=5)[-1] for line in maps if " /dev/shm/" in line]
                self._shared_memory.update(Path(path) for path in paths)

    def leftovers(self) -> list[str]:
        """Folders of engines that were not removed, and their files in shared memory."""
        files = [*self.temporary.glob("megappo-engine-*"), *self._shared_memory]
        return sorted(str(path) for path in files if path.exists())

    def end(self) -> None:
        """Kills what is left of it; also when this program ends. May be called twice."""
        atexit.unregister(self.end)
        self._ended.set()
        for process in self.survivors():
            process.kill()
        self.launcher.wait()


def _runs_trainer(process: psutil.Process) -> bool:
    return "megappo.train" in _command(process)


def _is_engine(process: psutil.Process) -> bool:
    """SGLang's processes have a title of their own, but for their first seconds."""
    command = " ".join(_command(process))
    return command.startswith("sglang::") or "multiprocessing.spawn import spawn_main" in command


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it ended meanwhile
        return []


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Every step's metrics but for those that may differ between equal runs."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(VARIABLE)} for row in rows]


def timings(run_dir: Path) -> Mapping[str, float]:
    """Median seconds of each phase."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    names = {key.removeprefix("timing_s/") for row in rows for key in row if "timing_s/" in key}
    found = {}
    for name in names:
        values = sorted(row[f"timing_s/{name}"] for row in rows if f"timing_s/{name}" in row)
        found[name] = values[len(values) // 2]
    return found


def contents(run_dir: Path) -> dict[str, str]:
    """Digests of what a finished run leaves: model, samples, last checkpoint."""
    latest = (run_dir / "checkpoints" / "latest").read_text().strip()
    return {
        f"{folder}/{name}": digest
        for folder in ("actor_hf", "rollouts", f"checkpoints/{latest}")
        for name, digest in digests(run_dir / folder).items()
    }


def digests(folder: Path) -> dict[str, str]:
    """Digest of what each file below a folder says."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(_content(p)).hexdigest()
        for p in folder.rglob("*")
        if p.is_file()
    }


def _content(path: Path) -> bytes:
    """A file's bytes; of Megatron's common state, which is numbers and words, what they say.

    Pickle writes an object that occurs twice once, and a resumed run has read some twice. The
    config in the small state names the run's own folder. A checkpoint's `.metadata` holds times:
    it only has to be there.
    """
    if path.name == ".metadata":
        return b""
    if path.name == "common.pt":
        return repr(torch.load(path, weights_only=True)).encode()
    if path.name == "state.json" and "step_" in path.parent.name:
        state = json.loads(path.read_text())
        del state["config"]["trainer.run_dir"]
        return json.dumps(state).encode()
    return path.read_bytes()


def differences(found: Path, expected: Path) -> list[str]:
    """Where a finished run differs from another; empty if all numbers and weights are equal."""
    problems = []
    rows, wanted = metrics(found), metrics(expected)
    if len(rows) != len(wanted):
        problems.append(f"{len(rows)} steps logged instead of {len(wanted)}")
    for row, want in zip(rows, wanted, strict=False):
        keys = [k for k in row.keys() | want.keys() if row.get(k) != want.get(k)]
        if keys:
            problems.append(f"step {want['step']}: {', '.join(sorted(keys)[:5])}")
    files, wanted_files = contents(found), contents(expected)
    for name in sorted(files.keys() | wanted_files.keys()):
        if files.get(name) != wanted_files.get(name):
            problems.append(f"file {name}")
    return problems


def restarts(run_dir: Path) -> list[dict[str, Any]]:
    """The run's events of engines that were replaced."""
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["kind"] == "engine_restarted"]
