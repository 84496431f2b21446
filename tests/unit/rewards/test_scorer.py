"""The scorer keeps order, counts every failure, and stops a batch with too many of them."""

import logging
import threading
import time

import numpy as np
import pytest

from megappo.errors import DataError, UserError
from megappo.registry import Registry
from megappo.rewards import REWARDS, resolve
from megappo.rewards.base import RewardTimeoutError
from megappo.rewards.scorer import Scorer


def registry_of(**functions):
    registry = Registry("data_source")
    for name, function in functions.items():
        registry.register(name)(lambda *, method, function=function: function)
    return registry


def number_in_response(response, ground_truth, extra_info):
    return float(response)


def fail_on_three(response, ground_truth, extra_info):
    if response == "3":
        raise ZeroDivisionError("three is too much")
    return float(response)


def samples(count, source="toy"):
    return [(source, str(n), "", {}) for n in range(count)]


def scorer(function, **settings):
    settings = {"num_threads": 1, "max_error_rate": 0.5} | settings
    return Scorer(registry=registry_of(toy=function), **settings)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_scores_come_back_in_order_with_sums_per_source(num_threads):
    def late_if_small(response, ground_truth, extra_info):
        time.sleep(0.02 if int(response) < 4 else 0.0)
        return float(response)

    registry = registry_of(even=late_if_small, odd=late_if_small)
    scorer = Scorer(num_threads=num_threads, max_error_rate=0.0, registry=registry)
    batch = [("odd" if n % 2 else "even", str(n), "", {}) for n in range(8)]
    result = scorer.score(batch)
    assert result.scores == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert result.per_source == {"even": (12.0, 4), "odd": (16.0, 4)}
    assert (result.errors, result.timeouts, result.error_rate) == (0, 0, 0.0)


def test_more_than_one_thread_runs_rewards_at_once():
    barrier = threading.Barrier(2, timeout=20)

    def meet(response, ground_truth, extra_info):
        barrier.wait()
        return 1.0

    assert scorer(meet, num_threads=2, max_error_rate=0.0).score(samples(2)).scores == [1.0, 1.0]


def test_a_reward_gets_the_row_it_belongs_to():
    seen = []
    scorer(lambda *row: seen.append(row) or 1.0).score([("toy", "r", "g", {"level": 3})])
    assert seen == [("r", "g", {"level": 3})]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_one_raising_reward_of_eight_is_an_error_rate_of_an_eighth(num_threads):
    result = scorer(fail_on_three, num_threads=num_threads, max_error_rate=0.125).score(samples(8))
    assert result.scores == [0.0, 1.0, 2.0, 0.0, 4.0, 5.0, 6.0, 7.0]
    assert result.errors == 1
    assert result.error_rate == 0.125
    assert result.per_source == {"toy": (25.0, 8)}


def test_above_the_allowed_rate_the_batch_is_refused_with_cause_and_row():
    with pytest.raises(RuntimeError) as caught:
        scorer(fail_on_three, max_error_rate=0.124).score(samples(8))
    message = str(caught.value)
    assert "1 of 8 rewards failed, above reward.max_error_rate 0.124" in message
    assert "sample 3, data_source 'toy': ZeroDivisionError: three is too much" in message
    assert "in fail_on_three" in message
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_rate_of_exactly_the_limit_is_allowed():
    def fail_below_29(response, ground_truth, extra_info):
        assert int(response) >= 29
        return 1.0

    # 0.29 * 100 is less than 29 in floating point.
    assert scorer(fail_below_29, max_error_rate=0.29).score(samples(100)).errors == 29


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (None, "TypeError: a reward must return one number, got None of type NoneType"),
        ("1", "TypeError: a reward must return one number, got '1' of type str"),
        ([1.0, 0.0], "TypeError: a reward must return one number, got [1.0, 0.0] of type list"),
        (float("nan"), "ValueError: a reward must return a finite number, got nan"),
        (float("-inf"), "ValueError: a reward must return a finite number, got -inf"),
    ],
)
def test_a_value_that_is_no_finite_number_is_a_named_error(value, cause, caplog):
    with caplog.at_level(logging.WARNING):
        result = scorer(lambda *row: value, max_error_rate=1.0).score(samples(2))
    assert result.scores == [0.0, 0.0]
    assert result.errors == 2
    assert cause in caplog.text
    with pytest.raises(RuntimeError, match="2 of 2 rewards failed"):
        scorer(lambda *row: value, max_error_rate=0.9).score(samples(2))


@pytest.mark.parametrize("value", [True, 1, np.float32(1.0), np.int64(1)])
def test_any_kind_of_finite_number_is_a_score(value):
    result = scorer(lambda *row: value, max_error_rate=0.0).score(samples(1))
    assert result.scores == [1.0]
    assert type(result.scores[0]) is float


def test_a_cause_is_logged_once_with_its_source_and_place(caplog):
    def complain(response, ground_truth, extra_info):
        raise ValueError(f"bad row {response}")

    failing = scorer(complain, max_error_rate=1.0)
    with caplog.at_level(logging.WARNING):
        failing.score(samples(4))
        failing.score(samples(4))
    assert len(caplog.records) == 1
    assert "data_source 'toy'" in caplog.text
    assert "ValueError: bad row 0 (test_scorer.py:" in caplog.text


def test_a_timeout_scores_zero_and_is_no_error():
    def give_up(response, ground_truth, extra_info):
        raise RewardTimeoutError("too long")

    result = scorer(give_up, max_error_rate=0.0).score(samples(3))
    assert (result.scores, result.errors, result.timeouts) == ([0.0, 0.0, 0.0], 0, 3)


def test_a_stop_from_the_keyboard_is_not_taken_for_a_failed_reward():
    def interrupt(response, ground_truth, extra_info):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scorer(interrupt, max_error_rate=1.0).score(samples(1))


def test_an_empty_batch_has_no_scores_and_no_errors():
    result = scorer(number_in_response, max_error_rate=0.0).score([])
    assert (result.scores, result.errors, result.timeouts, result.per_source) == ([], 0, 0, {})
    assert result.error_rate == 0.0


@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_math_timeout_is_counted_and_the_rest_of_the_batch_is_scored(num_threads):
    batch = [
        ("math", "\\boxed{x+1}", "1+x", {}),
        ("math", "\\boxed{5^{5^{5^{5^{5}}}}}", "5", {}),
        ("gsm8k", "#### 5", "5", {}),
        ("arithmetic", "5", "5", {}),
    ]
    result = Scorer(num_threads=num_threads, max_error_rate=0.0).score(batch)
    assert result.scores == [1.0, 0.0, 1.0, 0.0]
    assert (result.errors, result.timeouts) == (0, 1)
    assert result.per_source == {"math": (1.0, 2), "gsm8k": (1.0, 1), "arithmetic": (0.0, 1)}


def test_a_ground_truth_that_cannot_be_used_is_an_error_of_its_row():
    batch = [("gsm8k", "#### 5", "5", {}), ("gsm8k", "#### 5", "five", {})]
    with pytest.raises(RuntimeError, match=r"1 of 2 rewards failed.*sample 1.*got 'five'"):
        Scorer(num_threads=1, max_error_rate=0.0).score(batch)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_threads": 0}, r"num_threads must be at least 1, got 0"),
        ({"max_error_rate": 1.5}, r"max_error_rate must be a share from 0 to 1, got 1\.5"),
        ({"max_error_rate": float("nan")}, r"from 0 to 1, got nan"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        scorer(number_in_response, **settings)


def test_all_built_in_rewards_resolve_and_score():
    rewards = resolve(["gsm8k", "math", "exact_match", "arithmetic", "gsm8k"])
    assert sorted(rewards) == list(REWARDS) == ["arithmetic", "exact_match", "gsm8k", "math"]
    assert rewards["gsm8k"]("#### 7", "7", {}) == 1.0
    assert rewards["arithmetic"]("#### 7", "7", {}) == 1.0
    assert rewards["exact_match"]("yes", "yes", {}) == 1.0
    assert rewards["math"]("\\boxed{7}", "7", {}) == 1.0


def test_flexible_applies_to_gsm8k_and_arithmetic_alike():
    rewards = resolve(["gsm8k", "arithmetic"], method="flexible")
    assert rewards["gsm8k"]("it is 7", "7", {}) == 1.0
    assert rewards["arithmetic"]("it is 7", "7", {}) == 1.0


def test_an_unknown_method_is_refused_at_start():
    with pytest.raises(UserError, match="got 'loose'"):
        resolve(["gsm8k"], method="loose")


@pytest.mark.parametrize("source", ["", "gsm8", "openai/gsm8k"])
def test_an_unknown_or_empty_data_source_lists_the_known_ones(source):
    with pytest.raises(DataError) as caught:
        resolve(["gsm8k", source])
    assert f"the data has {source!r}" in str(caught.value)
    assert "known: arithmetic, exact_match, gsm8k, math" in str(caught.value)
    with pytest.raises(DataError):
        Scorer(num_threads=1, max_error_rate=1.0).score([(source, "1", "1", {})])


def test_all_unknown_data_sources_are_named_at_once_with_a_suggestion():
    with pytest.raises(DataError, match=r"'', 'mat'.*known: "):
        resolve(["mat", "", "math"])
    with pytest.raises(DataError, match=r"did you mean 'math'\?"):
        resolve(["mat"])
