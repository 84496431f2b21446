"""Where checkpoints lie and which of them is whole. No framework is imported.

`checkpoints/step_000010/` is written under a temporary name, synced and then renamed, so a folder
of that name is complete; the file `latest`, moved last, names the one to resume from. Each holds
finite weights: those that are not are never saved (`trainer.guard`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.errors import CheckpointError

_STEP = re.compile(r"step_(\d{6,})")
LATEST = "latest"
BEST = "best"
STATE_FILE = "state.json"


@dataclass(frozen=True, kw_only=True)
class KeepPolicy:
    """Which checkpoints are kept."""

    newest: int
    every: int = 0
    """also those whose step is a multiple of it; 0: none"""
    best: bool = False
    """also the one of the highest validation score, which the file `best` then names"""


def folder_of(run_dir: Path) -> Path:
    """Where a run's checkpoints lie."""
    return run_dir / "checkpoints"


def step_name(step: int) -> str:
    """Folder name of a step."""
    return f"step_{step:06d}"


def complete_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint, oldest first."""
    if not folder.is_dir():
        return []
    found = (_STEP.fullmatch(p.name) for p in folder.iterdir() if (p / STATE_FILE).is_file())
    return sorted(int(m[1]) for m in found if m)


def latest(folder: Path) -> Path | None:
    """The checkpoint to resume from, None if there is none.

    Without a pointer the newest complete checkpoint counts: a run never starts over because one
    small file is missing.

    Raises:
        CheckpointError: the pointer names a checkpoint that is not there.
    """
    steps = complete_steps(folder)
    pointer = folder / LATEST
    if pointer.is_file():
        named = folder / pointer.read_text().strip()
        if not named.exists() and (_replaced(named) / STATE_FILE).is_file():
            return _replaced(named)  # the run ended between two renames
        if not (named / STATE_FILE).is_file():
            have = ", ".join(step_name(s) for s in steps) or "none"
            raise CheckpointError(
                f"{pointer} names {named.name}, which is missing or incomplete (complete: {have}); "
                f"write the name of a complete one into {pointer}, or remove {folder} to start over"
            )
        return named
    return folder / step_name(steps[-1]) if steps else None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The small state of a checkpoint: step, layout, data position, controller.

    Raises:
        CheckpointError: unreadable.
    """
    try:
        state = json.loads((checkpoint / STATE_FILE).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{checkpoint / STATE_FILE} cannot be read: {error}") from error
    assert isinstance(state, dict)
    return state


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Writes the small state of a checkpoint."""
    (folder / STATE_FILE).write_text(json.dumps(state, indent=1))


def check_space(folder: Path, num_bytes: int) -> None:
    """Looks for room before anything large is written.

    Raises:
        OSError: with what is needed and what is free.
    """
    needed = num_bytes + num_bytes // 50 + 2**20  # indexes and small files
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"{folder} has {free / 2**20:,.1f} MiB free and the checkpoint needs "
            f"{needed / 2**20:,.1f} MiB: make room, or lower checkpoint.keep"
        )


def publish(temporary: Path, final: Path) -> None:
    """Makes a written checkpoint durable, gives it its name, and moves the pointer to it."""
    for path in sorted(temporary.rglob("*")):
        _sync(path)
    _sync(temporary)
    replaced = _replaced(final)
    if final.exists():  # an earlier try at the same step, before the run went back behind it
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    temporary.rename(final)
    _sync(final.parent)
    _point(final.parent / LATEST, final.name)
    shutil.rmtree(replaced, ignore_errors=True)


def _replaced(final: Path) -> Path:
    """Where a checkpoint waits until another of the same step has its name."""
    return final.with_name(f"{final.name}.replaced")


def prune(folder: Path, policy: KeepPolicy) -> None:
    """Removes checkpoints that the policy does not keep, and what interrupted saves left behind.

    Newest by the time of writing, not by step: after a return to an earlier step the ones beyond it
    are the old ones. What `latest` names is never removed, and no checkpoint has a weight that is
    not finite.
    """
    named = (folder / LATEST).read_text().strip()
    paths = [folder / step_name(step) for step in complete_steps(folder)]
    paths.sort(key=lambda path: (path.name == named, (path / STATE_FILE).stat().st_mtime_ns))
    kept = set(paths[-policy.newest :])
    if policy.every:
        kept |= {path for path in paths if int(path.name[5:]) % policy.every == 0}
    best = _best(paths) if policy.best else None
    if best is not None:
        kept.add(best)
        _point(folder / BEST, best.name)
    _remove_leftovers(folder)
    for path in paths:
        if path not in kept:
            # Under another name at once: a folder that is half removed must not count as complete.
            path.rename(path.with_name(path.name + ".removed"))
    _remove_leftovers(folder)


def tidy(folder: Path, policy: KeepPolicy) -> None:
    """Makes up for what a killed save had still to do; for a start, before anything is saved.

    After the last save of a run nothing else would. A checkpoint that had given its name away gets
    it back. Where somebody moved `latest` back, newer checkpoints stay until the next save.
    """
    for replaced in folder.glob("*.replaced"):
        final = replaced.with_suffix("")
        if not final.exists():  # the run ended between two renames
            replaced.rename(final)
    found = latest(folder)
    if found is not None and found.name == step_name(complete_steps(folder)[-1]):
        _point(folder / LATEST, found.name)  # which may be the one before it, or missing
        prune(folder, policy)
    else:
        _remove_leftovers(folder)


def _remove_leftovers(folder: Path) -> None:
    for pattern in ("*.saving", "*.replaced", "*.removed"):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover)


def _best(paths: Sequence[Path]) -> Path | None:
    """The checkpoint of the highest validation score, of equal ones the newest; None without."""
    scores = [(read_state(path).get("val_score"), path) for path in reversed(paths)]
    scored = [(score, path) for score, path in scores if score is not None]
    return max(scored, key=lambda pair: float(pair[0]))[1] if scored else None


def _point(pointer: Path, name: str) -> None:
    """Makes a pointer file name a checkpoint, in one durable move."""
    scratch = pointer.with_name(pointer.name + ".tmp")
    scratch.write_text(name + "\n")
    _sync(scratch)
    scratch.replace(pointer)
    _sync(pointer.parent)


def _sync(path: Path) -> None:
    """Fsync of a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
