"""The scorer keeps order, counts every failure, and stops a batch with too many of them."""

import logging
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest

from megappo.config.rewards import RewardSection
from megappo.errors import DataError, UserError
from megappo.registry import Registry
from megappo.rewards import REWARDS, Term, math, resolve
from megappo.rewards.base import GroupReward, RewardTimeoutError, Sample
from megappo.rewards.scorer import Scorer


def registry_of(**functions):
    registry = Registry("reward")
    for name, function in functions.items():
        registry.register(name)(lambda settings, function=function: function)
    return registry


def number_in_response(response, ground_truth, extra_info):
    return float(response)


def fail_on_three(response, ground_truth, extra_info):
    if response == "3":
        raise ZeroDivisionError("three is too much")
    return float(response)


def returns(value):
    """A reward of this value, which it raises if that is an exception."""

    def reward(response, ground_truth, extra_info):
        if isinstance(value, Exception):
            raise value
        return value

    return reward


def samples(count, source="toy"):
    return [(source, str(n), "", {}) for n in range(count)]


def scorer(function, **settings):
    settings = {"num_threads": 1, "max_error_rate": 0.5} | settings
    return Scorer(RewardSection(**settings), registry=registry_of(toy=function))


@pytest.mark.parametrize("num_threads", [1, 4])
def test_scores_come_back_in_order_with_sums_per_source(num_threads):
    def late_if_small(response, ground_truth, extra_info):
        time.sleep(0.02 if int(response) < 4 else 0.0)
        return float(response)

    registry = registry_of(even=late_if_small, odd=late_if_small)
    scorer = Scorer(RewardSection(num_threads=num_threads, max_error_rate=0.0), registry=registry)
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
    assert seen == [("r", "g", {"level": 3, "data_source": "toy"})]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_one_raising_reward_of_eight_is_an_error_rate_of_an_eighth(num_threads):
    result = scorer(fail_on_three, num_threads=num_threads, max_error_rate=0.125).score(samples(8))
    assert result.scores == [0.0, 1.0, 2.0, 0.0, 4.0, 5.0, 6.0, 7.0]
    assert result.failed == [number == 3 for number in range(8)]
    assert result.errors == 1
    assert result.error_rate == 0.125
    assert result.per_source == {"toy": (25.0, 7)}


def test_above_the_allowed_rate_the_batch_is_refused_with_cause_and_row():
    with pytest.raises(RuntimeError) as caught:
        scorer(fail_on_three, max_error_rate=0.124).score(samples(8))
    message = str(caught.value)
    assert "1 of 8 rewards failed, above reward.max_error_rate 0.124" in message
    assert (
        "sample 3, data_source 'toy', reward 'toy': ZeroDivisionError: three is too much" in message
    )
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
        (10**400, "OverflowError: int too large to convert to float"),
        (3.5e38, "ValueError: a score is a float32, at most 3.4028235e+38 in size, got 3.5e+38"),
        (-1e308, "ValueError: a score is a float32, at most 3.4028235e+38 in size, got -1e+308"),
        (RewardTimeoutError("late", score=float("nan")), "a reward must return a finite number"),
    ],
)
def test_a_value_that_is_no_finite_number_is_a_named_error(value, cause, caplog):
    with caplog.at_level(logging.WARNING):
        result = scorer(returns(value), max_error_rate=1.0).score(samples(2))
    assert result.scores == [0.0, 0.0]
    assert result.errors == 2
    assert cause in caplog.text
    with pytest.raises(RuntimeError, match="2 of 2 rewards failed"):
        scorer(returns(value), max_error_rate=0.9).score(samples(2))


@pytest.mark.parametrize("size", [np.finfo(np.float32).max, float(np.finfo(np.float32).max)])
def test_the_largest_numbers_of_a_batch_are_scores(size):
    result = scorer(returns(-size), max_error_rate=0.0).score(samples(1))
    assert np.isfinite(np.array(result.scores, dtype=np.float32)).all()


@pytest.mark.parametrize("weight", [3.0, 1e300, -1e308])
def test_a_sum_that_a_batch_cannot_hold_has_failed(weight, caplog):
    sources = {"mixed": ["number", {"name": "large", "weight": weight}]}
    registry = registry_of(number=number_in_response, large=lambda *row: 2e38 * float(row[0]))
    settings = RewardSection(sources=sources, max_error_rate=0.5)
    batch = [("mixed", "1", "", {}), ("mixed", "0", "", {})]
    with caplog.at_level(logging.WARNING):
        result = Scorer(settings, registry=registry).score(batch)
    assert (result.scores, result.failed) == ([0.0, 0.0], [True, False])
    assert result.per_source == {"mixed": (0.0, 1)}
    assert result.per_part == {("mixed", "number"): (1.0, 2), ("mixed", "large"): (2e38, 2)}
    assert "reward 'score' of data_source 'mixed' failed" in caplog.text


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


def test_rewards_that_are_late_have_failed_and_the_step_goes_on(caplog):
    seen, done = [], threading.Event()

    def hang_on_one(response, ground_truth, extra_info):
        seen.append(response)
        assert response != "1" or done.wait(600)
        return 1.0

    hanging = scorer(hang_on_one, max_error_rate=0.75, step_timeout_s=0.2)
    scoring = hanging.begin(["toy"] * 4)
    batch = [Sample(*sample) for sample in samples(4)]
    scoring.put(0, batch[0])
    deadline = time.monotonic() + 60
    while not scoring.num_done:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for number in (1, 2, 3):
        scoring.put(number, batch[number])
    with caplog.at_level(logging.WARNING):
        result = scoring.result()
    done.set()
    assert (result.scores, result.failed) == ([1.0, 0.0, 0.0, 0.0], [False, True, True, True])
    assert result.timeouts == 3
    assert "reward 'toy' of data_source 'toy' failed" in caplog.text
    assert "3 of 4 calls of rewards had not ended 0.2 s after the responses were" in caplog.text
    assert "2 of them had not begun" in caplog.text
    assert hanging.score(samples(1)).scores == [1.0]
    assert seen == ["0", "1", "0"]  # what had not begun never does


def test_a_stop_from_the_keyboard_is_not_taken_for_a_failed_reward():
    def interrupt(response, ground_truth, extra_info):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scorer(interrupt, max_error_rate=1.0).score(samples(1))


QUEUED = """
import os, sys, threading, time
from megappo.config.rewards import RewardSection
from megappo.registry import Registry
from megappo.rewards.base import Sample
from megappo.rewards.scorer import Scorer
began, registry = threading.Semaphore(0), Registry("reward")
def slow(response, ground_truth, extra_info):
    os.write(1, b"begun\\n")  # one call, so that the two threads' lines do not mix
    began.release()
    time.sleep(600)
registry.register("toy")(lambda settings: slow)
scorer = Scorer(RewardSection(num_threads=2), registry=registry)
scoring = scorer.begin(["toy"] * 20)
for number in range(20):
    scoring.put(number, Sample("toy", "", "", {}))
began.acquire(), began.acquire()
if "close" in sys.argv:
    scorer.close()
    print(sum(call.future.cancelled() for call in scoring._calls), "dropped")
"""


@pytest.mark.parametrize("how", ["close", "exit"])
def test_rewards_that_wait_or_work_do_not_hold_up_the_end_of_the_process(how):
    done = subprocess.run(
        [sys.executable, "-c", QUEUED, how], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("\n")[:-1] == ["begun"] * 2 + ["18 dropped"] * (how == "close")


def test_a_closed_scorer_lets_go_of_its_threads_and_starts_anew():
    toy = scorer(number_in_response, num_threads=3)
    before = set(threading.enumerate())
    assert toy.score(samples(3)).scores == [0.0, 1.0, 2.0]
    started = set(threading.enumerate()) - before
    assert len(started) == 3
    scoring = toy.begin(["toy"])
    toy.close()
    toy.close()
    deadline = time.monotonic() + 15
    while any(thread.is_alive() for thread in started):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    scoring.put(0, Sample("toy", "1", "", {}))  # late: it is dropped
    with pytest.raises(CancelledError):
        scoring.result()
    assert toy.score(samples(2)).scores == [0.0, 1.0]


def test_an_empty_batch_has_no_scores_and_no_errors():
    result = scorer(number_in_response, max_error_rate=0.0).score([])
    assert (result.scores, result.errors, result.timeouts, result.per_source) == ([], 0, 0, {})
    assert result.error_rate == 0.0


@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_math_timeout_is_counted_and_the_rest_of_the_batch_is_scored(num_threads, monkeypatch):
    monkeypatch.setattr(math, "TIMEOUT_S", 5.0)  # one comparison must end in time
    batch = [
        ("math", "\\boxed{x+1}", "1+x", {}),
        ("math", "\\boxed{5^{5^{5^{5^{5}}}}}", "5", {}),
        ("gsm8k", "#### 5", "5", {}),
        ("arithmetic", "5", "5", {}),
    ]
    result = Scorer(RewardSection(num_threads=num_threads, max_error_rate=0.0)).score(batch)
    assert result.scores == [1.0, 0.0, 1.0, 0.0]
    assert (result.errors, result.timeouts) == (0, 1)
    assert result.per_source == {"math": (1.0, 2), "gsm8k": (1.0, 1), "arithmetic": (0.0, 1)}


def test_a_ground_truth_that_cannot_be_used_is_an_error_of_its_row():
    batch = [("gsm8k", "#### 5", "5", {}), ("gsm8k", "#### 5", "five", {})]
    with pytest.raises(RuntimeError, match=r"1 of 2 rewards failed.*sample 1.*got 'five'"):
        Scorer(RewardSection(max_error_rate=0.0)).score(batch)


def test_built_in_rewards_resolve_and_score():
    rewards = resolve(["gsm8k", "math", "exact_match", "arithmetic", "gsm8k"], RewardSection())
    assert list(REWARDS) == [
        *("arithmetic", "code", "custom", "exact_match", "format", "gsm8k"),
        *("length", "math", "remote", "reward_model"),
    ]
    found = {source: terms[0].reward for source, terms in rewards.items()}
    assert found["gsm8k"]("#### 7", "7", {}) == 1.0
    assert found["arithmetic"]("#### 7", "7", {}) == 1.0
    assert found["exact_match"]("yes", "yes", {}) == 1.0
    assert found["math"]("\\boxed{7}", "7", {}) == 1.0


def test_flexible_applies_to_gsm8k_and_arithmetic_alike():
    rewards = resolve(["gsm8k", "arithmetic"], RewardSection(gsm8k_method="flexible"))
    for (term,) in rewards.values():
        assert term.reward("it is 7", "7", {}) == 1.0


def test_an_unknown_method_is_refused_at_start():
    with pytest.raises(UserError, match="got 'loose'"):
        resolve(["gsm8k"], RewardSection(gsm8k_method="loose"))


@pytest.mark.parametrize("source", ["", "gsm8", "openai/gsm8k"])
def test_an_unknown_or_empty_data_source_lists_the_known_ones(source):
    with pytest.raises(DataError) as caught:
        resolve(["gsm8k", source], RewardSection())
    assert f"the data has {source!r}" in str(caught.value)
    assert "known: arithmetic, code, custom, exact_match" in str(caught.value)
    with pytest.raises(DataError):
        Scorer(RewardSection(max_error_rate=1.0)).score([(source, "1", "1", {})])


def test_all_unknown_data_sources_are_named_at_once_with_a_suggestion():
    with pytest.raises(DataError, match=r"'', 'mat'.*known: "):
        resolve(["mat", "", "math"], RewardSection())
    with pytest.raises(DataError, match=r"did you mean 'math'\?"):
        resolve(["mat"], RewardSection())
    with pytest.raises(DataError, match=r"\"mine \(reward 'mat'\)\".*did you mean 'math'\?"):
        resolve(["mine"], RewardSection(sources={"mine": ["math", "mat"]}))


def test_parts_are_summed_with_their_weights_and_each_is_counted_by_itself():
    registry = registry_of(
        number=number_in_response, half=lambda *row: 0.5, fails=fail_on_three, ten=lambda *row: 10
    )
    sources = {
        "mixed": ["number", {"name": "half", "weight": -2.0}, {"name": "fails", "weight": 3}],
        "*": [{"name": "ten", "label": "all_others"}],
    }
    settings = RewardSection(sources=sources, max_error_rate=1.0)
    batch = [("mixed", "1", "", {}), ("elsewhere", "9", "", {}), ("mixed", "3", "", {})]
    result = Scorer(settings, registry=registry).score(batch)
    assert result.scores[:2] == [1 - 1 + 3, 10.0]
    assert result.failed == [False, False, True]
    assert result.per_source == {"mixed": (3.0, 1), "elsewhere": (10.0, 1)}
    assert result.per_part == {
        ("mixed", "number"): (4.0, 2),
        ("mixed", "half"): (1.0, 2),
        ("mixed", "fails"): (1.0, 1),  # the failed one is no zero of it
        ("elsewhere", "all_others"): (10.0, 1),
    }


class Together(GroupReward):
    """Scores a sample by where it stands in its call, and notes the calls."""

    def __init__(
        self, group_size, answer=lambda samples: [float(n) for n, _ in enumerate(samples)]
    ):
        self.group_size, self.answer, self.calls = group_size, answer, []

    def score(self, samples):
        self.calls.append([sample.response for sample in samples])
        return self.answer(samples)


@pytest.mark.parametrize("order", [range(7), range(6, -1, -1), (3, 0, 6, 1, 5, 2, 4)])
@pytest.mark.parametrize(("size", "calls"), [(0, ["0246"]), (3, ["024", "6"]), (1, list("0246"))])
def test_groups_and_scores_do_not_depend_on_the_order_in_which_samples_come(order, size, calls):
    together = Together(size)
    scorer = Scorer(RewardSection(), registry=registry_of(one=number_in_response, some=1))
    scorer._terms = {
        "one": (Term(label="one", weight=1.0, reward=number_in_response),),
        "some": (Term(label="some", weight=1.0, reward=together),),
    }
    batch = samples(7)
    sources = ["one" if n % 2 else "some" for n in range(7)]
    scoring = scorer.begin(sources)
    assert scoring.num_done == 0
    for number in order:
        scoring.put(number, Sample(sources[number], *batch[number][1:]))
    result = scoring.result()
    assert scoring.num_done == 7
    assert sorted(together.calls) == sorted(map(list, calls))
    of_some = {0: [0, 1, 2, 3], 3: [0, 1, 2, 0], 1: [0, 0, 0, 0]}[size]
    assert result.scores == [of_some[0], 1, of_some[1], 3, of_some[2], 5, of_some[3]]


def test_a_sample_that_comes_again_is_scored_again_only_if_it_is_another():
    seen = []
    scoring = scorer(lambda response, *row: seen.append(response) or float(response)).begin(["toy"])
    for response in ("1", "1", "2"):
        scoring.put(0, Sample("toy", response, "", {}))
    assert scoring.result().scores == [2.0]
    assert seen == ["1", "2"]


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (lambda samples: [1.0], "ValueError: 1 scores came back for 4 samples"),
        (lambda samples: [1.0, None, 2.0, float("nan")], "TypeError: a reward must return one"),
        (lambda samples: 1 / 0, "ZeroDivisionError"),
        (lambda samples: [1.0, 10**400, 2.0, 10**400], "2 of 4 .*OverflowError"),
        (lambda samples: 4, "TypeError: 'int' object is not iterable"),
    ],
)
def test_what_a_group_reward_does_wrong_is_named(answer, cause):
    failing = Scorer(RewardSection(max_error_rate=0.25), registry=registry_of())
    failing._terms = {"toy": (Term(label="toy", weight=1.0, reward=Together(0, answer)),)}
    with pytest.raises(RuntimeError, match=cause):
        failing.score(samples(4))
