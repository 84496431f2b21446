"""What happens in a folder, told by Linux (inotify): for kills between two renames.

Looking at a folder again and again sees a moment of a millisecond too late, or never.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import struct
import time
from pathlib import Path
from types import TracebackType

IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE = 0x40, 0x80, 0x100
_HEAD = struct.Struct("iIII")
"""wd, mask, cookie, length of the name that follows"""


class FolderEvents:
    """Names that appear in a folder or leave it by a rename, from the moment of construction on."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_CLOEXEC)
        mask = IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE
        watch = libc.inotify_add_watch(self._descriptor, os.fsencode(folder), mask)
        if watch < 0:
            raise OSError(ctypes.get_errno(), f"inotify cannot watch {folder}")

    def wait(
        self, kind: int, name: re.Pattern[str], timeout_s: float, *, spins: bool = False
    ) -> str | None:
        """The first name that fits and that the event is of; None if the time is over before.

        Args:
            kind: of the event, such as `IN_CREATE`.
            name: pattern of the whole name.
            timeout_s: to wait for the next event.
            spins: look all the time instead of sleeping.
        """
        while self._has_news(timeout_s, spins=spins):
            data = os.read(self._descriptor, 65536)
            while data:
                _, mask, _, length = _HEAD.unpack_from(data)
                found = data[_HEAD.size : _HEAD.size + length].rstrip(b"\0").decode()
                data = data[_HEAD.size + length :]
                if mask & kind and name.fullmatch(found):
                    return found
        return None

    def _has_news(self, timeout_s: float, *, spins: bool) -> bool:
        deadline = time.monotonic() + timeout_s
        while spins and time.monotonic() < deadline:
            if select.select([self._descriptor], [], [], 0)[0]:
                return True
        return bool(select.select([self._descriptor], [], [], 0 if spins else timeout_s)[0])

    def __enter__(self) -> FolderEvents:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)
