"""How many files this process may have open: sockets of engines, shared buckets, weights, logs.

Weights that are pushed as lists keep a descriptor a tensor, and every request of a server a socket:
the 256 or 1,024 that many systems start with are too few. A process may raise its own limit up to
the hard one.
"""

from __future__ import annotations

import resource

NEEDED_FILES = 4096


def raise_file_limit(wanted: int = 65536) -> int:
    """Raises the soft limit as far as the hard one and `wanted` allow; returns what is in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    reachable = wanted if hard == unlimited else min(wanted, hard)
    if soft != unlimited and soft < reachable:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
        soft = reachable
    return wanted if soft == unlimited else soft


def file_limit_warning(limit: int) -> str:
    """What to tell the user of a limit that is in force; empty if it is enough."""
    if limit >= NEEDED_FILES:
        return ""
    return (
        f"only {limit} files can be open at once, and engines and weights may need {NEEDED_FILES}: "
        "raise the hard limit (ulimit -Hn, or the container's --ulimit nofile)"
    )
