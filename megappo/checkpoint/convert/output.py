"""The folder that a conversion makes: whole or not there; room is asked for before it begins."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from megappo.checkpoint.convert.place import RELEASE, TRACKER_FILE
from megappo.errors import CheckpointError
from megappo.models.hf_folder import flush


def check_output(out: Path, *, overwrite: bool, sources: Sequence[Path]) -> None:
    """Refuses a path that is taken, or that may not be replaced.

    Args:
        out: Folder to make.
        overwrite: It may replace a model or a checkpoint that a conversion made.
        sources: Folders that are read; none of them is replaced.

    Raises:
        CheckpointError: it exists and `overwrite` is not given, or it is something else.
    """
    for source in sources:
        if out.resolve() in (source.resolve(), *source.resolve().parents):
            raise CheckpointError(f"{out} is, or holds, {source}, which is read; choose another")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise CheckpointError(f"{out} is no folder that could be replaced; choose another path")
    if out.exists() and not overwrite:
        raise CheckpointError(f"{out} exists; give --overwrite to replace it, or another path")
    if out.exists() and any(out.iterdir()) and not _is_of_a_conversion(out):
        raise CheckpointError(
            f"{out} holds neither a Hugging Face model nor a converted checkpoint, so it is not "
            "replaced; choose another path, or remove it"
        )


def _is_of_a_conversion(out: Path) -> bool:
    """Whether a folder holds a Hugging Face model, or a checkpoint as `to-megatron` writes it."""
    is_model = (out / "config.json").is_file() and any(out.glob("*.safetensors"))
    return is_model or ((out / RELEASE).is_dir() and (out / TRACKER_FILE).is_file())


def check_space(out: Path, needed_bytes: int) -> None:
    """Refuses a disk that is too small, with both numbers.

    Raises:
        CheckpointError: less is free than will be written.
    """
    free = shutil.disk_usage(_existing(out)).free
    if free < needed_bytes:
        raise CheckpointError(
            f"{out} needs {size_text(needed_bytes)}, but {size_text(free)} are free there; make "
            "room or choose another disk"
        )


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which takes the name `out` when all of it is written and flushed.

    What stood under that name stays until then. After an error nothing is left; a process that is
    killed leaves `.NAME.partial`, which the next try removes.

    Raises:
        CheckpointError: the disk is full, or a limit on files is reached.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    _remove(partial)
    partial.mkdir()
    try:
        yield partial
        for path in sorted(partial.rglob("*")):
            flush(path)
        flush(partial)
        _take_place(partial, out)
    except OSError as error:
        _remove(partial)
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise CheckpointError(
                f"writing {out} failed: {os.strerror(error.errno)}; nothing is left of it, make "
                "room and start again"
            ) from error
        raise
    except BaseException:
        _remove(partial)
        raise


def _take_place(partial: Path, out: Path) -> None:
    replaced = out.with_name(f".{out.name}.replaced")
    _remove(replaced)
    if out.exists():
        out.rename(replaced)
    partial.rename(out)
    flush(out.parent)
    _remove(replaced)


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


class Progress:
    """Bytes done and time left on one line of a terminal, or a line every ten seconds elsewhere.

    Args:
        total_bytes: Of the whole.
        stream: Where to; the standard error output if not given.
    """

    def __init__(self, total_bytes: int, stream: TextIO | None = None) -> None:
        self._total = max(total_bytes, 1)
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._every_s = 0.2 if self._live else 10.0
        self._started = self._shown = time.monotonic()
        self._done = 0

    def add(self, num_bytes: int) -> None:
        """Counts bytes, and shows them if it is time to."""
        self._done += num_bytes
        now = time.monotonic()
        if now - self._shown >= self._every_s:
            self._shown = now
            self._show(now)

    def close(self) -> float:
        """Ends the line; returns seconds since the start."""
        if self._live:
            self._stream.write("\r\033[K")
            self._stream.flush()
        return time.monotonic() - self._started

    def _show(self, now: float) -> None:
        elapsed = now - self._started
        left = elapsed * (self._total - self._done) / max(self._done, 1)
        filled = 24 * self._done // self._total
        line = (
            f"[{'#' * filled:<24}] {size_text(self._done)} of {size_text(self._total)}, "
            f"{size_text(int(self._done / max(elapsed, 1e-9)))}/s, {left:.0f} s left"
        )
        self._stream.write(f"\r\033[K{line}" if self._live else line + "\n")
        self._stream.flush()


def size_text(num_bytes: int) -> str:
    """A size as a person reads it: 4.3 GB."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
