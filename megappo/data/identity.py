"""What a data file is, wherever it lies: so that a resumed run is not fed other rows unseen.

Left out: hashing whole files, which may be large. Parquet keeps the sizes and statistics of all its
columns at its end, so that another content shows there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_END_BYTES = 2**20


def file_identities(files: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Size and hash of the first and last MiB of each file, as JSON values, in order."""
    return [_identity(Path(file)) for file in files]


def _identity(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(_END_BYTES))
        file.seek(max(0, size - _END_BYTES))
        digest.update(file.read(_END_BYTES))
    return {"name": path.name, "bytes": size, "sha256_of_ends": digest.hexdigest()}
