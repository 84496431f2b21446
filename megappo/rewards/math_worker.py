r"""The process that compares two expressions; `math_pool` starts, feeds and kills it.

One JSON object a line. In: `{"answer": str, "wanted": str, "timeout_s": float}`. Out: once
`{"ready": true}`, then for each request `{"equal": bool}`, `{"out_of_memory": true}` or
`{"error": str}`. It ends when its stdin closes. Only math-verify is imported: no torch, so a start
takes about a second and some 60 MB.

The limits here are for the case that nobody is left to kill it: the kernel ends a comparison
shortly after its time limit even if the parent was killed, because SIGALRM keeps its default action
and so needs no turn of the interpreter, which a power of two large integers does not give.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from typing import Any

MEMORY_LIMIT_BYTES = 2 * 1024**3
ORPHAN_MARGIN_S = 1.0
"""The parent kills first; the kernel's alarm comes this much later."""


def main() -> None:
    """Serves requests until stdin closes."""
    _limit_resources()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Whatever a library prints must not end up between the replies.
    os.dup2(2, 1)
    # math-verify logs every expression it cannot read; that is a usual event with model output.
    logging.disable(logging.CRITICAL)
    # First use compiles regular expressions and grammar tables: not on a request's time.
    _compare(answer=r"\frac{1}{2}x+\sqrt{2}", wanted=r"\{1, 2\}")
    _send(replies, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"] + ORPHAN_MARGIN_S)
        reply = _answer(request["answer"], request["wanted"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(replies, reply)


def _limit_resources() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Ctrl-C reaches the whole process group; the parent decides, and closes stdin when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _answer(answer: str, wanted: str) -> dict[str, Any]:
    try:
        return {"equal": _compare(answer=answer, wanted=wanted)}
    except MemoryError:
        return {"out_of_memory": True}
    except Exception as error:  # reported to the parent, which raises it there
        return {"error": f"{type(error).__name__}: {error}"[:2000]}


def _compare(*, answer: str, wanted: str) -> bool:
    from math_verify import parse, verify

    # Its own time limits are off: they rely on a Python signal handler, which a long operation on
    # large integers never lets run.
    gold = parse(f"\\boxed{{{wanted}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify finds no expression in the ground truth {wanted!r}")
    return bool(
        verify(gold, parse(f"\\boxed{{{answer}}}", parsing_timeout=None), timeout_seconds=None)
    )


def _send(replies: Any, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
