"""exact_match compares word for word and refuses a blank ground truth."""

import pytest

from megappo.errors import DataError
from megappo.rewards.exact_match import score


@pytest.mark.parametrize(
    ("response", "expected"),
    [("B", 1.0), ("  B\n", 1.0), ("b", 0.0), ("B.", 0.0), ("A B", 0.0), ("", 0.0)],
)
def test_only_white_space_around_the_answer_is_ignored(response, expected):
    assert score(response, " B ") == expected


def test_a_blank_ground_truth_is_refused_so_that_silence_earns_nothing():
    with pytest.raises(DataError, match=r"ground truth with text, got ' \\n'"):
        score("", " \n")
