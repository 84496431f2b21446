"""Host memory that this process may still take: of the machine, and of its control groups.

Under Slurm or in a container the limit of a control group (v2) is lower than what the machine has
free, and passing it ends the process without an error.
"""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes that can be taken before the machine or a control group runs out."""
    limits = [int(psutil.virtual_memory().available)]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:  # no Linux, or no /proc
        return limits[0]
    for line in lines:
        number, _, path = line.partition("::")
        if number == "0":  # version 2
            limits += group_room(_CGROUPS, path)
    return max(0, min(limits))


def group_room(root: Path, path: str) -> list[int]:
    """What a control group and each group around it leaves, bytes; none where there is no limit.

    Args:
        root: where control groups are mounted.
        path: of the group below it, as in `/proc/self/cgroup`.
    """
    group = root / path.strip("/")
    found = []
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            break
        limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
        if limit is not None and used is not None:
            found.append(limit - used + _reclaimable(folder))
    return found


def _read(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit


def _reclaimable(folder: Path) -> int:
    """Cached file pages, which count as used and are given up on demand."""
    try:
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return 0
    return int(fields.get("inactive_file", 0))
