"""Reward for answers that are right only word for word, such as labels and multiple choice.

Nothing but the white space around both texts is ignored. Case and punctuation count: data that
wants them ignored should be prepared that way, so that the rule stays visible in the data.
"""

from __future__ import annotations

from megappo.errors import DataError


def score(response: str, ground_truth: str) -> float:
    """1.0 if both texts are the same after stripping white space around them, else 0.0.

    Raises:
        DataError: If `ground_truth` is blank, because an empty response would then earn the reward.
    """
    wanted = ground_truth.strip()
    if not wanted:
        raise DataError(
            f"exact_match needs a ground truth with text, got {ground_truth!r}: "
            "fill the ground truth of this row or drop the row"
        )
    return float(response.strip() == wanted)
