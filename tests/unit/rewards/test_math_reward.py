"""The math reward: finding the box, deciding at sight, and agreeing with math-verify."""

import itertools

import pytest
from math_verify import parse, verify

from megappo.errors import DataError
from megappo.rewards import math
from megappo.rewards.math import check, equal_at_sight, extract_boxed, score
from megappo.rewards.math_pool import MathVerifier


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} or rather \boxed{2}", "2"),
        (r"\boxed{\{1, 2\}} }", r"\{1, 2\}"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
        (r"\boxed{}", ""),
        (r"\boxed{1} and \boxed{\frac{1}{2", None),
        ("5", None),
        (r"\boxed 5", None),
    ],
)
def test_the_last_box_counts_with_its_braces_balanced(text, inside):
    assert extract_boxed(text) == inside


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("5", "5"),
        ("5.", "5"),
        ("$5$", "5"),
        ("\\$5", "5"),
        ("05", "5"),
        ("1,000", "1000"),
        ("2.50", "2.5"),
        (".5", "\\frac12"),
        ("1/2", "\\frac{2}{4}"),
        ("\\dfrac{-3}{4}", "\\frac{-3}{4}"),
        ("-\\tfrac{3}{4}", "-3/4"),
        ("( 1, 2 )", "\\left(1,2\\right)"),
        ("2 \\sqrt{3}", "2\\sqrt{3}"),
        ("Evelyn", "\\text{Evelyn}"),
        ("\\text{evelyn}", "\\text{Evelyn}"),
        ("A", "\\text{(A)}"),
    ],
)
def test_plain_answers_are_equal_at_sight(answer, wanted):
    assert equal_at_sight(answer, wanted) is True


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [("5", "6"), ("-5", "5"), ("1/2", "1/3"), ("12", "\\frac{1}{2}"), ("nylevE", "\\text{Evelyn}")],
)
def test_plain_answers_are_unequal_at_sight(answer, wanted):
    assert equal_at_sight(answer, wanted) is False


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("1 2", "12"),
        ("x+1", "1+x"),
        ("1/0", "1"),
        ("0.333333", "1/3"),
        ("9" * 50, "1"),
        ("1,2", "12"),
    ],
)
def test_everything_else_is_left_to_algebra(answer, wanted):
    assert equal_at_sight(answer, wanted) is None


def test_what_is_decided_at_sight_is_what_math_verify_says():
    texts = ["0", "7", "-7", "07", "12", "1,200", "1200", "1/2", "2/4", "-1/2", "\\frac{1}{2}"]
    texts += ["\\frac12", "-\\frac{1}{2}", "\\dfrac{7}{1}", "0.5", ".50", "2.0", "1200.0", "-0.5"]
    decided = 0
    for answer, wanted in itertools.product(texts, texts):
        equal = equal_at_sight(answer, wanted)
        if equal is not None:
            decided += 1
            assert equal == verify(parse(f"${wanted}$"), parse(f"${answer}$")), (answer, wanted)
    assert decided >= 200


@pytest.fixture(scope="module")
def verifier():
    verifier = MathVerifier(timeout_s=30.0)
    yield verifier
    verifier.close()


@pytest.mark.parametrize(
    ("answer", "ground_truth", "expected"),
    [
        ("x + 1", "1+x", 1.0),
        ("x + 1", "1-x", 0.0),
        ("2\\sqrt{2}", "\\sqrt{8}", 1.0),
        ("\\{2, 1\\}", "\\{1,2\\}", 1.0),
        ("(2, 1)", "(1, 2)", 0.0),
        ("[0, 1)", "[0, 1]", 0.0),
        ("0.333333", "1/3", 1.0),
        ("0.33", "1/3", 0.0),
        ("90^\\circ", "90", 1.0),
        ("x = 5", "5", 1.0),
        ("\\frac{1}{2", "0.5", 0.0),
    ],
)
def test_algebra_decides_the_rest(verifier, answer, ground_truth, expected):
    assert check(f"Thus \\boxed{{{answer}}}.", ground_truth, verifier=verifier) == expected


@pytest.fixture
def patient_score(monkeypatch):
    """`score` with a verifier whose limit a comparison on a loaded machine is far from."""
    monkeypatch.setattr(math, "TIMEOUT_S", 30.0)
    math._shared_verifier.cache_clear()
    yield score
    math._shared_verifier.cache_clear()


def test_score_compares_in_a_process_of_its_own_and_at_sight(patient_score):
    score = patient_score
    assert score("\\boxed{x^2 + 2x + 1}", "(x+1)^2") == 1.0
    assert score("\\boxed{\\frac{1}{2}}", "0.5") == 1.0
    assert score("\\boxed{3}", "4") == 0.0
    assert score("3", "3") == 0.0
    assert score("\\boxed{ }", "3") == 0.0


def test_a_ground_truth_may_stand_in_a_box():
    assert score("\\boxed{7}", "so we get \\boxed{7}") == 1.0


@pytest.mark.parametrize("ground_truth", ["", "  ", "$$", "\\boxed{}"])
def test_a_blank_ground_truth_is_refused(ground_truth):
    with pytest.raises(DataError, match="must hold an expression, got"):
        score("\\boxed{}", ground_truth)
