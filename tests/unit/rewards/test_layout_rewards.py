"""Length and format: literal responses and scores, limits, and what a config may say."""

import pytest

from megappo.config.rewards import FormatRewardSection, LengthRewardSection, RewardSection
from megappo.errors import UserError
from megappo.rewards import format, length
from megappo.rewards.base import RewardTimeoutError

THINK = "<think>{}</think>\n<answer>{}</answer>"


@pytest.mark.parametrize(
    ("tokens", "score"), [(0, 0), (9, 0), (10, 1), (20, 1), (25, 0.75), (40, 0), (99, 0)]
)
def test_a_length_scores_one_up_to_the_free_tokens_and_falls_to_zero(tokens, score):
    reward = length.make(LengthRewardSection(min_tokens=10, free_tokens=20, max_tokens=40))
    assert reward("", "", {"response_tokens": tokens}) == score


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (THINK.format("so\nand so", "7"), 1),
        ("  " + THINK.format("", "") + "\n", 1),
        ("Well: " + THINK.format("a", "7"), 0),
        (THINK.format("a", "7") + " it is", 0),
        (THINK.format("a <answer>", "7"), 0),
        (THINK.format("a", "7") + THINK.format("a", "7"), 0),
        ("<answer>7</answer><think>a</think>", 0),
        ("<think>a<answer>7</answer></think>", 0),
        ("</think><think> <answer>7</answer>", 0),
        ("<think>a</think>", 0),
        ("", 0),
    ],
)
def test_tags_make_up_the_whole_response_each_once_and_in_order(response, score):
    reward = format.make(FormatRewardSection(tags=["think", "answer"]))
    assert reward(response, "", {}) == score


@pytest.mark.parametrize(
    ("response", "score"), [("a\n####  7", 1), ("#### 7", 1), ("#### 7 more", 0), ("7", 0)]
)
def test_a_pattern_matches_the_whole_response_over_lines(response, score):
    assert format.make(FormatRewardSection(pattern=r".*#### +\d+"))(response, "", {}) == score


def test_pattern_and_tags_must_both_hold():
    reward = format.make(FormatRewardSection(pattern=r".*\d.*", tags=["a"]))
    assert [reward(text, "", {}) for text in ("<a>1</a>", "<a>x</a>", "1")] == [1, 0, 0]


def test_a_pattern_that_takes_for_ever_is_given_up():
    reward = format.make(FormatRewardSection(pattern=r"(?:a|a)*[bc]", timeout_s=0.2))
    with pytest.raises(RewardTimeoutError, match=r"took over 0\.2 s"):
        reward("a" * 100, "", {})


def test_a_format_without_a_layout_or_with_a_broken_pattern_is_refused():
    with pytest.raises(UserError, match="no layout to look for"):
        format.make(FormatRewardSection())
    with pytest.raises(UserError, match="no regular expression: missing"):
        format.make(FormatRewardSection(pattern="(a"))


def test_a_part_may_set_fields_of_its_section_for_itself():
    settings = RewardSection(
        sources={
            "mine": [
                {"name": "math", "weight": 2},
                {"name": "format", "weight": 0.1, "tags": ["a"], "label": "tags"},
                {"name": "gsm8k", "gsm8k_method": "flexible"},
            ]
        },
        format=FormatRewardSection(timeout_s=3),
    )
    math, tags, gsm8k = settings.parts("mine")
    assert (math.weight, math.label) == (2.0, "math")
    assert (tags.weight, tags.label) == (0.1, "tags")
    assert (tags.settings.format.tags, tags.settings.format.timeout_s) == (["a"], 3)
    assert gsm8k.settings.gsm8k_method == "flexible"
    assert settings.format.tags == []
    assert [part.name for part in settings.parts("gsm8k")] == ["gsm8k"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([], "the list is empty"),
        ([{"weight": 2}], "is no reward: give a name"),
        (3, "3 is no reward"),
        (["math", "math"], "label 'math' comes twice"),
        ({"name": "math", "label": "score"}, "label is 'score'"),
        ({"name": "math", "weight": "much"}, "weight is 'much': it must be a finite number"),
        ({"name": "math", "weight": float("inf")}, "weight is inf"),
        ({"name": "format", "patern": "a"}, "patern is not a known key of a format part; known: n"),
        ({"name": "code", "timeout_s": -1}, "timeout_s is -1: it must be over 0"),
        ({"name": "code", "memory_mb": "1 GB"}, "code.memory_mb is '1 GB': it must be of type int"),
        ({"name": "code", "partial": 1}, "code.partial is 1: it must be of type bool"),
    ],
)
def test_a_line_of_sources_that_breaks_a_rule_is_named(line, message):
    with pytest.raises(ValueError, match="sources.mine: .*" + message.replace(".", r"\.")):
        RewardSection(sources={"mine": line})


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        (LengthRewardSection, {"free_tokens": 512}, "free_tokens is 512: it must be under max_"),
        (LengthRewardSection, {"min_tokens": 300}, "min_tokens is 300: it must be at most free_"),
        (FormatRewardSection, {"tags": ["<a>"]}, "tags is '<a>': a name without brackets"),
        (FormatRewardSection, {"tags": ["a", "a"]}, "name each tag once"),
    ],
)
def test_settings_that_make_no_sense_are_refused(section, settings, message):
    with pytest.raises(ValueError, match=message):
        section(**settings)
