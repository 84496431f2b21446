"""A folder that a program filled as it liked: it may be deep, wide and locked.

So nothing here recurses, and removal holds no path: both end at a depth that a program can reach.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path


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
