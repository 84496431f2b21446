"""The gsm8k rule on hand-written cases, on random numbers, and on the real data set if present."""

import json
import os
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.errors import DataError, UserError
from megappo.rewards.gsm8k import extract_answer, score

REPOSITORY = Path(__file__).resolve().parents[3]
GSM8K = Path(os.environ.get("MEGAPPO_GSM8K_DIR", REPOSITORY.parent / "shared" / "data" / "gsm8k"))


@pytest.mark.parametrize(
    ("response", "ground_truth"),
    [
        ("#### 18", "18"),
        ("#### $29.00", "29"),
        ("#### 1,000.", "1000"),
        ("#### 80,000", "80000"),
        ("#### 80000", "80,000"),
        ("#### 3.", "3"),
        ("#### \\$18", "18"),
        ("#### **18**", "18"),
        ("#### **$1,234.50**", "1234.5"),
        ("#### 20%", "20"),
        ("#### 20", "20\\%"),
        ("#### $\\boxed{18}$", "18"),
        ("#### 1 000", "1000"),
        ("#### -5", "-5"),
        ("#### \u22125", "-5"),
        ("#### -$5", "-5"),
        ("#### .5", "0.50"),
        ("#### 007", "7"),
        ("#### 18 dollars a day", "18"),
        ("#### $18/day", "18"),
        ("####18", " 18 "),
        ("48 / 2 = 24\n#### 24\n", "24"),
    ],
)
def test_formatting_of_a_right_number_does_not_cost_the_reward(response, ground_truth):
    assert score(response, ground_truth) == 1.0
    assert score(response, ground_truth, method="flexible") == 1.0


@pytest.mark.parametrize(
    ("response", "ground_truth"),
    [
        ("#### 18.5", "18"),
        ("#### 18", "-18"),
        ("#### 180", "18"),
        ("#### 1.8", "18"),
        ("#### 18/2", "18"),
        ("#### 5 + 13", "5"),
        ("#### 1e3", "1"),
        ("#### 3.5.2", "3.5"),
        ("#### 9 - 4", "9"),
        ("#### the answer is 18", "18"),
        ("####\n18", "18"),
        ("####", "18"),
        ("", "0"),
        ("18", "18"),
        ("### 18", "18"),
    ],
)
def test_strict_gives_nothing_for_another_number_or_no_marked_number(response, ground_truth):
    assert score(response, ground_truth) == 0.0


def test_an_answer_followed_by_long_text_still_counts():
    assert score("#### 42" + " and so on" * 40, "42") == 1.0
    assert score("#### 42\n" + "filler " * 20_000, "42") == 1.0


@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_the_last_marker_is_the_answer(method):
    response = "#### 5 ... wait, I forgot two. #### 7"
    assert score(response, "7", method=method) == 1.0
    assert score(response, "5", method=method) == 0.0


def test_a_last_marker_without_a_number_is_no_answer_in_strict():
    assert extract_answer("#### 5\n#### I do not know", "strict") is None


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("She has 3 and 4, so 7.", "7"),
        ("so x = -5", "-5"),
        ("10-5", "5"),
        ("10 - 5", "5"),
        ("it costs -$1,200.50!", "-1200.50"),
        ("H2O and 12", "12"),
        ("12 of H2O", "12"),
        ("#### twelve, 12", "12"),
        ("**18**", "18"),
        ("5 eggs\nor 18\nof H2O\n", "18"),
    ],
)
def test_flexible_falls_back_to_the_last_number(response, number):
    assert extract_answer(response, "strict") is None
    assert extract_answer(response, "flexible") == Decimal(number)


def test_flexible_prefers_a_marked_number_over_a_later_one():
    assert score("#### 7\nThat took 3 steps.", "7", method="flexible") == 1.0


def test_flexible_finds_nothing_in_a_response_without_numbers():
    assert score("no idea", "0", method="flexible") == 0.0


def test_digits_of_other_scripts_are_not_numbers():
    assert extract_answer("#### \u0661\u0668", "flexible") is None


def test_numbers_are_compared_exactly_and_never_rounded():
    assert score("#### 0.1", "0.10000000000000000000000000000001") == 0.0
    assert score("#### " + "9" * 5000, "9" * 5000) == 1.0


@given(
    st.integers(-(10**12), 10**12),
    st.integers(0, 999),
    st.sampled_from(["{}", "${}", "**{}**", "\\${}", "{}%", "{}.", "  {} "]),
)
def test_any_grouped_number_equals_itself_and_not_its_neighbour(whole, thousandths, frame):
    # The oracle counts in whole thousandths, so it shares no decimal arithmetic with the reward.
    sign = "-" if whole < 0 else ""
    written = f"{sign}{abs(whole):,}.{thousandths:03d}"
    exact = Fraction(written.replace(",", ""))
    assert exact * 1000 == int(written.replace(",", "").replace(".", ""))
    response = "#### " + frame.format(written)
    assert score(response, written) == 1.0
    assert extract_answer(response, "strict") == Decimal(exact.numerator) / exact.denominator
    assert score(response, str(whole + 1)) == float(exact == whole + 1)


@pytest.mark.parametrize("ground_truth", ["", "eighteen", "NaN", "Infinity", "1e3", "18/2", "$"])
def test_a_ground_truth_that_is_no_number_is_named(ground_truth):
    with pytest.raises(DataError, match="must be one number, got") as caught:
        score("#### 18", ground_truth)
    assert repr(ground_truth) in str(caught.value)


def test_an_unknown_method_lists_the_known_ones():
    with pytest.raises(UserError, match=r"one of strict, flexible, got 'loose'"):
        score("#### 18", "18", method="loose")


def gold_answers(name):
    path = GSM8K / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there; set MEGAPPO_GSM8K_DIR to a folder with GSM8K's jsonl")
    return [json.loads(line)["answer"] for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize(
    ("names", "num_rows"), [(("train",), 7473), (("test",), 1319), (("train", "test"), 8792)]
)
def test_every_gold_answer_of_gsm8k_scores_one_and_its_neighbours_zero(names, num_rows):
    answers = [answer for name in names for answer in gold_answers(name)]
    truths = [answer.split("####")[1].strip() for answer in answers]
    assert len(answers) == num_rows
    wrong = [
        truth for answer, truth in zip(answers, truths, strict=True) if not score(answer, truth)
    ]
    assert wrong == []
    # All answers are whole numbers, so int is an oracle of its own.
    values = [int(truth.replace(",", "")) for truth in truths]
    for row, answer in enumerate(answers):
        neighbour = (row + 1) % num_rows
        assert score(answer, truths[neighbour]) == float(values[row] == values[neighbour])
        assert extract_answer(answer, "flexible") == values[row]
