import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.ppo.advantages import compute_gae
from megappo.ppo.rewards import place_scores, token_rewards


def test_the_score_lies_on_the_last_trained_token() -> None:
    # Three tokens, the third being EOS, and two of padding.
    mask = torch.tensor([[True, True, True, False, False]])
    assert place_scores(torch.tensor([1.0]), mask).tolist() == [[0, 0, 1, 0, 0]]


def test_the_score_skips_tool_output_at_the_end() -> None:
    mask = torch.tensor([[True, False, True, False, False], [False, True, True, True, True]])
    placed = place_scores(torch.tensor([2.0, -3.0]), mask)
    assert placed.tolist() == [[0, 0, 2, 0, 0], [0, 0, 0, 0, -3]]


def test_an_empty_response_gets_no_score() -> None:
    mask = torch.zeros(1, 4, dtype=torch.bool)
    assert place_scores(torch.tensor([1.0]), mask).tolist() == [[0, 0, 0, 0]]
    assert place_scores(torch.tensor([math.nan]), mask).tolist() == [[0, 0, 0, 0]]


def test_a_batch_of_width_zero_gets_no_score() -> None:
    assert place_scores(torch.ones(3), torch.zeros(3, 0, dtype=torch.bool)).shape == (3, 0)


@settings(deadline=None)
@given(
    st.integers(0, 9).flatmap(
        lambda t: st.lists(st.lists(st.booleans(), min_size=t, max_size=t), min_size=1, max_size=4)
    )
)
def test_each_score_is_placed_once_where_a_search_from_the_right_finds_it(rows) -> None:
    scores = [float(b + 1) for b in range(len(rows))]
    expected = [[0.0] * len(row) for row in rows]
    for b, row in enumerate(rows):
        for t in reversed(range(len(row))):
            if row[t]:
                expected[b][t] = scores[b]
                break
    mask = torch.tensor(rows, dtype=torch.bool).reshape(len(rows), len(rows[0]))
    assert place_scores(torch.tensor(scores), mask).tolist() == expected


def test_a_score_before_tool_output_reaches_the_trained_tokens_undecayed() -> None:
    mask = torch.tensor([[True, True, False, False]])
    rewards = place_scores(torch.tensor([1.0]), mask)
    advantages, _ = compute_gae(rewards, torch.zeros(1, 4), mask, gamma=1.0, lam=0.5)
    assert advantages.tolist() == [[0.5, 1.0, 0.0, 0.0]]


MASK = torch.tensor([[True, False, True, False], [False, False, False, False]])
LOG_PROBS = torch.tensor([[-1.0, -9.0, -2.0, -9.0], [-5.0, -5.0, -5.0, -5.0]])
REF_LOG_PROBS = torch.tensor([[-1.5, -3.0, -1.0, -3.0], [-6.0, -6.0, -6.0, -6.0]])


def test_kl_in_reward_by_hand() -> None:
    # k1 on the trained tokens: 0.5 and -1; times 0.1, subtracted; mean within the sample -0.25.
    rewards, (kl_sum, num_sequences) = token_rewards(
        torch.tensor([1.0, 1.0]),
        MASK,
        log_probs=LOG_PROBS,
        ref_log_probs=REF_LOG_PROBS,
        kl_coef=0.1,
    )
    assert rewards[0].tolist() == pytest.approx([-0.05, 0.0, 1.1, 0.0], rel=1e-6)
    assert rewards[1].tolist() == [0.0, 0.0, 0.0, 0.0]
    assert (kl_sum.item(), num_sequences.item()) == (-0.25, 1.0)


def test_kl_in_reward_takes_the_kind_it_is_given() -> None:
    # k2: 0.125 and 0.5
    rewards, (kl_sum, _) = token_rewards(
        torch.tensor([1.0, 1.0]),
        MASK,
        log_probs=LOG_PROBS,
        ref_log_probs=REF_LOG_PROBS,
        kl_coef=2.0,
        kl_kind="k2",
    )
    assert rewards[0].tolist() == [-0.25, 0.0, 0.0, 0.0]
    assert kl_sum.item() == 0.3125


def test_kl_in_reward_ignores_garbage_in_masked_slots() -> None:
    def run(garbage: float):
        dirty = [torch.where(MASK, x, torch.tensor(garbage)) for x in (LOG_PROBS, REF_LOG_PROBS)]
        return token_rewards(
            torch.tensor([1.0, garbage]),
            MASK,
            log_probs=dirty[0],
            ref_log_probs=dirty[1],
            kl_coef=0.1,
            kl_kind="k3",
        )

    clean, (clean_kl, _) = run(0.0)
    for garbage in (math.nan, math.inf, -1e30):
        rewards, (kl_sum, _) = run(garbage)
        assert torch.equal(rewards, clean)
        assert torch.equal(kl_sum, clean_kl)


def test_without_log_probs_the_rewards_are_the_placed_scores() -> None:
    rewards, (kl_sum, num_sequences) = token_rewards(torch.tensor([1.0, 1.0]), MASK)
    assert rewards.tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]
    assert (kl_sum.item(), num_sequences.item()) == (0.0, 0.0)


def test_with_weight_zero_an_infinite_kl_is_measured_but_not_paid() -> None:
    rewards, (kl_sum, _) = token_rewards(
        torch.tensor([1.0]),
        torch.tensor([[True]]),
        log_probs=torch.tensor([[-1.0]]),
        ref_log_probs=torch.tensor([[-math.inf]]),
    )
    assert rewards.tolist() == [[1.0]]
    assert math.isinf(kl_sum.item())


def test_a_nan_log_prob_on_a_trained_token_stays_visible() -> None:
    rewards, _ = token_rewards(
        torch.tensor([1.0]),
        torch.tensor([[True, True]]),
        log_probs=torch.tensor([[math.nan, -1.0]]),
        ref_log_probs=torch.tensor([[-1.0, -1.0]]),
        kl_coef=0.1,
        kl_kind="k3",
    )
    assert rewards.isnan().tolist() == [[True, False]]


def test_a_far_reference_gives_a_finite_reward() -> None:
    rewards, _ = token_rewards(
        torch.tensor([1.0]),
        torch.tensor([[True]]),
        log_probs=torch.tensor([[-120.0]]),
        ref_log_probs=torch.tensor([[-1.0]]),
        kl_coef=1.0,
        kl_kind="k3",
    )
    assert rewards.isfinite().all()


def test_a_kl_weight_without_log_probs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kl_coef = 0\.1 needs the log-probs"):
        token_rewards(torch.tensor([1.0, 1.0]), MASK, log_probs=LOG_PROBS, kl_coef=0.1)


@pytest.mark.parametrize("kl_coef", [-0.1, math.nan])
def test_a_kl_weight_that_would_raise_the_kl_is_refused(kl_coef) -> None:
    with pytest.raises(ValueError, match="kl_coef must be >= 0, got"):
        token_rewards(torch.tensor([1.0, 1.0]), MASK, kl_coef=kl_coef)
