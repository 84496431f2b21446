r"""Reward for competition maths: the last \boxed{...} of the response against the ground truth.

Two answers are equal if `math-verify` says so, which compares expressions with sympy. Sympy may
work for ever on what a model writes, so it runs in a subprocess that is killed on a wall clock
(`math_pool`). Most rows never get there: equal texts, whole numbers and fractions are decided here
in microseconds with the same outcome, and words are compared as words.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction

from megappo.errors import DataError
from megappo.rewards.base import RewardTimeoutError
from megappo.rewards.math_pool import MathVerifier

TIMEOUT_S = 2.0
"""Wall-clock limit of one comparison; usual ones take a few hundredths of a second."""

_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_WORDS = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{((?=[^}]*[A-Za-z])[A-Za-z ()'-]+)\}")
_SIZING = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[!,;: ]|\\?\$")
_FRACTION_STYLE = re.compile(r"\\[dt]frac(?![A-Za-z])")
# A space between two letters or digits separates them ("1 2" is not 12); others mean nothing.
_IDLE_SPACE = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")

# At most 40 digits: a longer number is rare, and int() of very many digits is slow or refused.
_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3}){1,9}|[0-9]{1,40})"
_DECIMAL = re.compile(rf"([-+]?)({_INTEGER}(?:\.[0-9]{{1,40}})?|\.[0-9]{{1,40}})")
_QUOTIENT = re.compile(
    rf"([-+]?)(?:\\frac\{{({_INTEGER})\}}\{{({_INTEGER})\}}|\\frac([0-9])([0-9])"
    rf"|({_INTEGER})/({_INTEGER}))"
)


def score(response: str, ground_truth: str) -> float:
    r"""1.0 if the last \boxed{...} of the response equals the ground truth, else 0.0.

    A comparison that runs out of time is 0.0; use `check` to tell it from a wrong answer.

    Raises:
        DataError: If the ground truth is blank.
        RuntimeError: If the comparing process cannot be started or ends by itself.
    """
    try:
        return check(response, ground_truth, verifier=_shared_verifier())
    except RewardTimeoutError:
        # A wrong answer by the rule of this file; the verifier has counted and logged it.
        return 0.0


def check(response: str, ground_truth: str, *, verifier: MathVerifier) -> float:
    """Like `score`, with the caller's verifier, and a timeout is an exception.

    Raises:
        DataError: If the ground truth is blank.
        RewardTimeoutError: If the comparison runs out of time or memory.
        RuntimeError: If the comparing process cannot be started or ends by itself.
    """
    boxed = extract_boxed(ground_truth)
    wanted = (ground_truth if boxed is None else boxed).strip()
    if not _tidy(wanted):
        raise DataError(
            f"a math ground truth must hold an expression, got {ground_truth!r}: "
            "fill the ground truth of this row or drop the row"
        )
    answer = extract_boxed(response)
    if answer is None or not answer.strip():
        return 0.0
    equal = equal_at_sight(answer, wanted)
    if equal is None:
        equal = verifier.equal(answer.strip(), wanted)
    return float(equal)


def extract_boxed(text: str) -> str | None:
    r"""What the last \boxed{...} holds, its braces balanced; None if there is none.

    A last box that never closes is no answer, and an earlier box does not stand in for it: the
    response was cut while it gave its answer.
    """
    opening = None
    for opening in _BOX.finditer(text):  # noqa: B007 (the last match is wanted)
        pass
    if opening is None:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, opening.end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[opening.end() : brace.start()]
    return None


def equal_at_sight(answer: str, wanted: str) -> bool | None:
    """Whether two answers are equal where that needs no algebra; None where it does.

    Unequal decimals are left to algebra, which allows for rounding (0.333333 is 1/3).
    """
    words = _WORDS.fullmatch(wanted)
    if words is not None:
        # As algebra, letters are factors: every anagram of a word would be equal to it.
        return _letters(answer) == _letters(wanted)
    if _tidy(answer) == _tidy(wanted):
        return True
    left, right = _rational(answer), _rational(wanted)
    if left is None or right is None:
        return None
    if left == right:
        return True
    return None if "." in answer + wanted else False


def _letters(text: str) -> str:
    words = _WORDS.fullmatch(text.strip())
    return " ".join((words[1] if words else text).strip(" ().").casefold().split())


def _tidy(text: str) -> str:
    text = _FRACTION_STYLE.sub(r"\\frac", _SIZING.sub("", text)).strip()
    return _IDLE_SPACE.sub("", text).rstrip(".")


def _rational(text: str) -> Fraction | None:
    text = _tidy(text)
    number = _DECIMAL.fullmatch(text)
    if number is not None:
        return Fraction(text.replace(",", ""))
    quotient = _QUOTIENT.fullmatch(text)
    if quotient is None:
        return None
    sign, *parts = quotient.groups()
    above, below = (int(part.replace(",", "")) for part in parts if part is not None)
    if below == 0:
        return None
    return Fraction(-above if sign == "-" else above, below)


@functools.cache
def _shared_verifier() -> MathVerifier:
    # `score` has no argument to carry processes; one verifier a process keeps them few. It starts
    # them on first use and ends them when the interpreter exits.
    return MathVerifier(timeout_s=TIMEOUT_S)
