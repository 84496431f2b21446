r"""What a worker process does for `math`: compares two expressions with math-verify.

In: `{"answer": str, "wanted": str}`. Out: `{"equal": bool}`. The supervisor imports math-verify (no
torch: about a second and 60 MB) for all its forks.
"""

from __future__ import annotations

import logging
from typing import Any

from megappo.rewards.worker import Task


def _prepare() -> None:
    # math-verify logs every expression it cannot read; that is a usual event with model output.
    logging.disable(logging.CRITICAL)
    # First use compiles regular expressions and grammar tables: not on a request's time.
    _compare(answer=r"\frac{1}{2}x+\sqrt{2}", wanted=r"\{1, 2\}")


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    return {"equal": _compare(answer=request["answer"], wanted=request["wanted"])}


def _compare(*, answer: str, wanted: str) -> bool:
    from math_verify import parse, verify

    # Its own time limits are off: they rely on a Python signal handler, which would have to wait
    # for a turn of the interpreter; a power of two large integers does not give one.
    gold = parse(f"\\boxed{{{wanted}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify finds no expression in the ground truth {wanted!r}")
    return bool(
        verify(gold, parse(f"\\boxed{{{answer}}}", parsing_timeout=None), timeout_seconds=None)
    )


TASK = Task(answer=_answer, prepare=_prepare)
