r"""Reward for grade-school sums whose answer is one number (GSM8K, Cobbe 2021, arXiv:2110.14168).

Answers of the data set end with "#### 18". The rule, for both methods: the last "####" of the whole
response marks the answer, and the number must follow it on the same line. The last one, because a
model may correct itself, and few-shot examples that it recites come first; text generated past its
answer is for stop strings to prevent. "strict" scores 0 without such a number, so the format is
learned too; "flexible" falls back to the last number of the response.

Both sides become a Decimal: `$`, `\$`, `,`, `%`, `*`, spaces and a trailing "." are ignored, so
"**$1,000.00**" is 1000, and nothing is rounded, so 18.5 is not 18. Expressions such as "36/2" are
no answer.
"""

from __future__ import annotations

import re
from decimal import Decimal

from megappo.errors import DataError, UserError

METHODS = ("strict", "flexible")
MARKER = "####"

# ASCII digits on purpose: \d also matches digits of other scripts. The groups are atomic, so that a
# number that may not count is never read as its own first digits.
_DIGITS = r"(?>[0-9]{1,3}(?:[ \u00a0\u202f][0-9]{3}(?![0-9]))+|[0-9][0-9,]*)"
_NUMBER = rf"[-+\u2212]?\\?\$?(?>{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
_SPACE = r"[^\S\n]"
_NOT_PART_OF_MORE = (
    r"(?!\.?[0-9]|[eE][-+]?[0-9]"
    rf"|{_SPACE}*[-+*/^=:\u00d7\u00f7]{_SPACE}*\\?\$?[0-9(])"
)
_MARKED = re.compile(rf"(?:{_SPACE}|[*$({{\[]|\\[$(\[]|\\boxed{{)*+({_NUMBER}){_NOT_PART_OF_MORE}")
# A minus after a word or a number is a hyphen or an operator, not a sign.
_ANYWHERE = re.compile(rf"(?<![\w.])({_NUMBER})(?!\.?[0-9]|[eE][-+]?[0-9])")
_NOISE = re.compile(r"[\s$,%*\\]")
_PLAIN = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")


def score(response: str, ground_truth: str, *, method: str = "strict") -> float:
    """1.0 if the answer of the response is the number of the ground truth, else 0.0.

    Args:
        response: The whole response; all of it is searched.
        ground_truth: The number alone, as it stands after "####" in the data set.
        method: "strict" or "flexible", see the top of this file.

    Raises:
        DataError: If `ground_truth` is not a number.
        UserError: If `method` is unknown.
    """
    wanted = normalise(ground_truth)
    if wanted is None:
        raise DataError(
            f"a gsm8k ground truth must be one number, got {ground_truth!r}: "
            f'keep only what follows "{MARKER}" in the answer'
        )
    answer = extract_answer(response, method)
    return float(answer is not None and answer == wanted)


def extract_answer(text: str, method: str) -> Decimal | None:
    """The number that `text` gives as its answer, or None if it gives none.

    Raises:
        UserError: If `method` is unknown.
    """
    check_method(method)
    marker = text.rfind(MARKER)
    if marker >= 0:
        marked = _MARKED.match(text, marker + len(MARKER))
        if marked is not None:
            return normalise(marked[1])
    if method == "strict":
        return None
    # A number never spans lines, and the last one usually stands in the last line.
    for line in reversed(text.splitlines()):
        numbers = _ANYWHERE.findall(line)
        if numbers:
            return normalise(numbers[-1])
    return None


def normalise(text: str) -> Decimal | None:
    """The number that is all of `text` once signs of money, grouping and emphasis are dropped."""
    plain = _NOISE.sub("", text).replace("\u2212", "-").rstrip(".")
    return Decimal(plain) if _PLAIN.fullmatch(plain) else None


def check_method(method: str) -> None:
    """Raises UserError unless `method` is one of `METHODS`."""
    if method not in METHODS:
        raise UserError(
            f"the gsm8k method must be one of {', '.join(METHODS)}, got {method!r}: "
            "set reward.gsm8k_method to one of them"
        )
