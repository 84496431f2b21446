"""A folder that a program filled as it liked: it may be deep, wide and locked.

So nothing here recurses, and removal holds no path: both end at a depth that a program can reach.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

_LONGEST_PATH = 3500
"""Bytes; the system takes 4096, of which one more name may have 256."""


def remove_tree(folder: Path) -> None:
    """Removes the folder and all that is in it; nobody may be at work in it any more.

    What lies in a folder below is moved up, so that two open folders do for any depth.

    Raises:
        OSError: something could not be removed.
    """
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    unused, number = secrets.token_hex(8), 0
    try:
        while names := os.listdir(top):
            for name in names:
                if not _opened_up(name, top):
                    os.unlink(name, dir_fd=top)
                    continue
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
                try:
                    for below in os.listdir(inner):
                        if not _opened_up(below, inner):
                            os.unlink(below, dir_fd=inner)
                            continue
                        number += 1
                        os.rename(below, f"{unused}-{number}", src_dir_fd=inner, dst_dir_fd=top)
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(folder)


def _opened_up(name: str, folder: int) -> bool:
    """Whether it is a folder; its owner then has all rights to it."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        return False
    os.chmod(name, 0o700, dir_fd=folder)
    return True


def is_over(folder: Path, *, max_bytes: int, max_entries: int) -> bool:
    """Whether more is in it than may be, or what cannot be seen; it may change meanwhile."""
    size, number = 0, 0
    left = [os.fsencode(folder)]
    while left:
        for found, path in _entries(left.pop()):
            number += 1
            is_folder = stat.S_ISDIR(found.st_mode)
            size += 0 if is_folder else found.st_size
            if size > max_bytes or number > max_entries or len(path) > _LONGEST_PATH:
                return True
            if is_folder and found.st_mode & stat.S_IRWXU == stat.S_IWUSR | stat.S_IXUSR:
                return True  # its owner can fill it, and nobody can look into it
            if is_folder:
                left.append(path)
    return False


def _entries(path: bytes) -> Iterator[tuple[os.stat_result, bytes]]:
    """Of a folder, as far as they stay while it is read."""
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                yield entry.stat(follow_symlinks=False), entry.path
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
            raise
