import math
from collections import Counter

import pytest
import torch

from megappo.rollout.draws import draw, uniform
from megappo.rollout.sampling import SamplingSettings

LOGITS = torch.tensor([0.5, 0.3, 0.2]).log()
LAST = 1 - 2.0**-48


def settings(**changes) -> SamplingSettings:
    return SamplingSettings(max_new_tokens=1, **changes)


def drawn(logits: torch.Tensor, at: float, **changes) -> tuple[int, float]:
    tokens, log_probs = draw(logits[None], [settings(**changes)], [at])
    return tokens[0], log_probs[0]


def test_a_uniform_number_is_the_same_in_every_process_and_differs_by_seed_and_position():
    assert uniform(3, 0) == 0.08621541671717026
    assert len({uniform(seed, position) for seed in range(100) for position in range(100)}) == 10**4


def test_uniform_numbers_fill_the_unit_interval_evenly():
    counts = torch.zeros(16)
    for position in range(8000):
        counts[int(uniform(2**62 + 5, position) * 16)] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 37.7  # chi-square, 15 degrees of freedom, p 0.001


@pytest.mark.parametrize(
    ("at", "token"), [(0.0, 0), (0.49, 0), (0.51, 1), (0.79, 1), (0.81, 2), (LAST, 2)]
)
def test_a_draw_inverts_the_cumulative_distribution(at, token):
    found, log_prob = drawn(LOGITS, at)
    assert found == token
    assert log_prob == pytest.approx(LOGITS[token].item(), abs=1e-6)


@pytest.mark.parametrize(
    "changes", [{"top_p": 0.7}, {"top_k": 2}, {"min_p": 0.5}, {"top_p": 0.7, "top_k": 3}]
)
def test_a_truncated_draw_keeps_two_of_three_and_reports_the_full_distribution(changes):
    """0.62 x 0.8 = 0.496 lies below 0.5, 0.63 x 0.8 = 0.504 above."""
    assert drawn(LOGITS, 0.62, **changes) == (0, pytest.approx(math.log(0.5), abs=1e-6))
    assert drawn(LOGITS, 0.63, **changes) == (1, pytest.approx(math.log(0.3), abs=1e-6))
    assert drawn(LOGITS, LAST, **changes)[0] == 1


def test_top_p_counts_what_top_k_left_out():
    """As SGLang does: 0.5 + 0.3 reaches 0.75 of the whole, though 0.5 is more than half of 0.8."""
    assert drawn(LOGITS, LAST, top_k=2, top_p=0.75)[0] == 1
    assert drawn(LOGITS, LAST, top_k=2, top_p=0.45)[0] == 0


def test_temperature_divides_the_logits():
    assert drawn(torch.tensor([2.0, 0.0]), 0.0, temperature=0.5)[1] == pytest.approx(
        -0.018150, abs=1e-6
    )


def test_greedy_takes_the_likeliest_and_reports_temperature_one():
    assert drawn(LOGITS, LAST, temperature=0.0) == (0, pytest.approx(math.log(0.5), abs=1e-6))


def test_extreme_logits_stay_exact_and_broken_ones_are_refused():
    assert drawn(torch.tensor([1e4, -1e4, 0.0]), LAST) == (0, 0.0)
    with pytest.raises(RuntimeError, match="not finite"):
        drawn(torch.tensor([0.0, torch.nan]), 0.5)


def test_a_row_does_not_depend_on_the_rows_around_it():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    kinds = [settings(), settings(top_k=3), settings(temperature=0.0), settings(top_p=0.5)]
    sampling = [kinds[i % 4] for i in range(6)]
    uniforms = [uniform(i, 0) for i in range(6)]
    tokens, log_probs = draw(logits, sampling, uniforms)
    for i in range(6):
        assert draw(logits[i : i + 1], [sampling[i]], [uniforms[i]]) == (
            [tokens[i]],
            [log_probs[i]],
        )


def test_draws_over_seeds_follow_the_softmax():
    logits = torch.tensor([1.0, -0.5, 0.3, 2.0, 0.0, -1.0, 0.7, 1.5])
    count, temperature = 8000, 0.8
    tokens, _ = draw(
        logits.expand(count, 8),
        [settings(temperature=temperature)] * count,
        [uniform(seed, 4) for seed in range(count)],
    )
    expected = (logits / temperature).softmax(-1) * count
    found = Counter(tokens)
    distance = sum((found[i] - e) ** 2 / e for i, e in enumerate(expected.tolist()))
    assert distance < 24.3  # chi-square, 7 degrees of freedom, p 0.001
