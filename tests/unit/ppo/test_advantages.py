import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.ppo.advantages import compute_gae, group_advantages, whiten
from megappo.ppo.masking import local_sq_dev, local_sum_count


def gae_by_summing(rewards, values, mask, gamma, lam, bootstrap):
    """Eq. 16 as a double sum over the trained tokens alone, in Python floats."""
    steps = [t for t, trained in enumerate(mask) if trained]
    r = [rewards[t] for t in steps]
    v = [values[t] for t in steps] + [bootstrap]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for i, t in enumerate(steps):
        later = range(i, len(steps))
        terms = [(gamma * lam) ** (k - i) * (r[k] + gamma * v[k + 1] - v[k]) for k in later]
        advantages[t] = math.fsum(terms)
        returns[t] = advantages[t] + v[i]
    return advantages, returns


def gae_of_row(rewards, values, mask, *, gamma, lam, bootstrap=None):
    advantages, returns = compute_gae(
        torch.tensor([rewards], dtype=torch.float32),
        torch.tensor([values], dtype=torch.float32),
        torch.tensor([mask], dtype=torch.bool),
        gamma=gamma,
        lam=lam,
        bootstrap_values=None if bootstrap is None else torch.tensor([bootstrap]),
    )
    return advantages[0].tolist(), returns[0].tolist()


def test_gae_of_three_tokens_by_hand() -> None:
    # deltas: 0.9*2 - 1 = 0.8; 0.9*3 - 2 = 0.7; 4 - 3 = 1. gamma*lam = 0.45.
    # A2 = 1; A1 = 0.7 + 0.45 = 1.15; A0 = 0.8 + 0.45 * 1.15 = 1.3175
    advantages, returns = gae_of_row([0, 0, 4], [1, 2, 3], [1, 1, 1], gamma=0.9, lam=0.5)
    assert advantages == pytest.approx([1.3175, 1.15, 1.0], rel=1e-6)
    assert returns == pytest.approx([2.3175, 3.15, 4.0], rel=1e-6)


def test_gae_charges_no_decay_for_tokens_after_the_last_trained_one() -> None:
    advantages, _ = gae_of_row([0, 1, 0, 0], [0] * 4, [1, 1, 0, 0], gamma=1.0, lam=0.5)
    assert advantages == [0.5, 1.0, 0.0, 0.0]
    advantages, _ = gae_of_row([0, 1, 0, 0], [0] * 4, [1, 1, 0, 0], gamma=0.0, lam=0.5)
    assert advantages == [0.0, 1.0, 0.0, 0.0]


def test_gae_charges_no_decay_for_a_masked_gap() -> None:
    gap, _ = gae_of_row([0, 9, 9, 1], [0.5, 7, 7, 0.25], [1, 0, 0, 1], gamma=0.5, lam=0.5)
    # A3 = 1 - 0.25 = 0.75; A0 = 0.5*0.25 - 0.5 + 0.25*0.75 = -0.1875
    assert gap == [-0.1875, 0.0, 0.0, 0.75]


def test_gae_ignores_critic_values_on_padding() -> None:
    advantages, returns = gae_of_row([0, 1, 0], [0, 0, 5], [1, 1, 0], gamma=1.0, lam=0.5)
    assert advantages == [0.5, 1.0, 0.0]
    assert returns == [0.5, 1.0, 0.0]


def test_gae_takes_an_end_as_final_unless_told_otherwise() -> None:
    advantages, _ = gae_of_row([0, 0], [0.2, 0.4], [1, 1], gamma=1.0, lam=1.0)
    assert advantages == pytest.approx([-0.2, -0.4], rel=1e-6)


def test_gae_bootstraps_a_cut_response_from_the_state_after_its_last_token() -> None:
    advantages, returns = gae_of_row([0, 0], [0.2, 0.4], [1, 1], gamma=1.0, lam=1.0, bootstrap=0.6)
    assert advantages == pytest.approx([0.4, 0.2], rel=1e-6)
    assert returns == pytest.approx([0.6, 0.6], rel=1e-6)


def test_gae_with_a_bootstrap_of_zero_is_gae_without_one() -> None:
    row = ([0.1, 0.7], [0.2, 0.4], [1, 1])
    assert gae_of_row(*row, gamma=0.9, lam=0.8) == gae_of_row(
        *row, gamma=0.9, lam=0.8, bootstrap=0.0
    )


SLOT = st.tuples(st.floats(-10, 10, width=32), st.floats(-10, 10, width=32), st.booleans())


@settings(deadline=None)
@given(
    st.integers(1, 8).flatmap(
        lambda t: st.lists(st.lists(SLOT, min_size=t, max_size=t), min_size=1, max_size=3)
    ),
    st.floats(0, 1),
    st.floats(0, 1),
    st.lists(st.floats(-10, 10, width=32), min_size=3, max_size=3),
)
def test_gae_equals_the_double_sum_over_trained_tokens(rows, gamma, lam, bootstraps) -> None:
    rewards, values, mask = (torch.tensor([[s[i] for s in row] for row in rows]) for i in range(3))
    boots = torch.tensor(bootstraps[: len(rows)])
    advantages, returns = compute_gae(
        rewards, values, mask, gamma=gamma, lam=lam, bootstrap_values=boots
    )
    for b, row in enumerate(rows):
        r, v, m = zip(*row, strict=True)
        expected = gae_by_summing(r, v, m, gamma, lam, bootstraps[b])
        # At most 8 steps of magnitude 30: 240 * 2^-23 * a few operations.
        assert advantages[b].tolist() == pytest.approx(expected[0], rel=1e-6, abs=1e-4)
        assert returns[b].tolist() == pytest.approx(expected[1], rel=1e-6, abs=1e-4)


def test_gae_ignores_garbage_in_masked_slots() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 4, 9, generator=generator)
    mask = torch.rand(4, 9, generator=generator) < 0.6
    clean = compute_gae(rewards, values, mask, gamma=0.99, lam=0.95)
    for garbage in (math.nan, math.inf, -math.inf, 1e38):
        dirty = [torch.where(mask, x, torch.full_like(x, garbage)) for x in (rewards, values)]
        again = compute_gae(*dirty, mask, gamma=0.99, lam=0.95)
        assert torch.equal(clean[0], again[0])
        assert torch.equal(clean[1], again[1])


def test_gae_with_lam_one_and_no_discount_returns_the_reward_to_go() -> None:
    _, returns = gae_of_row([1, 2, 4], [3, -5, 8], [1, 1, 1], gamma=1.0, lam=1.0)
    assert returns == [7.0, 6.0, 4.0]


def test_gae_of_a_sample_without_trained_tokens_is_zero() -> None:
    advantages, returns = gae_of_row([5, 5], [5, 5], [0, 0], gamma=1, lam=1, bootstrap=math.nan)
    assert advantages == returns == [0.0, 0.0]


def test_gae_of_an_empty_width_is_empty() -> None:
    empty = torch.zeros(2, 0)
    advantages, returns = compute_gae(empty, empty, empty.bool(), gamma=1.0, lam=1.0)
    assert advantages.shape == returns.shape == (2, 0)


def test_gae_keeps_a_nan_on_a_trained_token_visible_in_its_own_sample_only() -> None:
    values = torch.tensor([[0.0, math.nan], [0.0, 0.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    advantages, _ = compute_gae(torch.ones(2, 2), values, mask, gamma=1.0, lam=1.0)
    assert advantages.isnan().any(dim=1).tolist() == [True, False]


def test_gae_holds_no_gradient() -> None:
    values = torch.ones(1, 2, requires_grad=True)
    advantages, returns = compute_gae(
        torch.ones(1, 2), values, torch.ones(1, 2, dtype=torch.bool), gamma=1.0, lam=1.0
    )
    assert not advantages.requires_grad
    assert not returns.requires_grad


@pytest.mark.parametrize(("gamma", "lam"), [(1.01, 0.9), (-0.1, 0.9), (0.9, 1.5), (0.9, math.nan)])
def test_gae_refuses_a_discount_outside_zero_to_one(gamma, lam) -> None:
    with pytest.raises(ValueError, match=r"(gamma|lam) must lie in \[0, 1\], got"):
        gae_of_row([0], [0], [1], gamma=gamma, lam=lam)


def test_whitening_one_to_four_by_hand() -> None:
    mask = torch.tensor([[True, True, True, True, False]])
    white = whiten(torch.tensor([[1.0, 2.0, 3.0, 4.0, math.nan]]), mask)
    assert white[0].tolist() == pytest.approx([-1.3416408, -0.4472136, 0.4472136, 1.3416408, 0])


def test_whitening_over_two_context_parallel_slices_equals_whitening_the_whole() -> None:
    # Zigzag: rank 0 holds tokens 0 and 3, rank 1 tokens 1 and 2.
    slices = [torch.tensor([[1.0, 4.0]]), torch.tensor([[2.0, 3.0]])]
    mask = torch.ones(1, 2, dtype=torch.bool)
    total, count = map(sum, zip(*(local_sum_count(x, mask) for x in slices), strict=True))
    mean = total / count
    variance = sum(local_sq_dev(x, mask, mean) for x in slices) / count
    white = [whiten(x, mask, moments=(mean, variance))[0].tolist() for x in slices]
    assert white[0] == pytest.approx([-1.3416408, 1.3416408])
    assert white[1] == pytest.approx([-0.4472136, 0.4472136])


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=20))
def test_whitening_matches_the_statistics_module(numbers) -> None:
    mask = torch.ones(1, len(numbers), dtype=torch.bool)
    white = whiten(torch.tensor([numbers]), mask)[0].tolist()
    mean = statistics.fmean(numbers)
    std = math.sqrt(statistics.pvariance(numbers) + 1e-8)
    assert white == pytest.approx([(x - mean) / std for x in numbers], rel=1e-5, abs=1e-5)


def test_whitening_accepts_plain_numbers_as_moments() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    white = whiten(torch.tensor([[1.0, 5.0]]), mask, moments=(3.0, 4.0))
    assert white[0].tolist() == pytest.approx([-1.0, 1.0])


@pytest.mark.parametrize(
    ("x", "mask"),
    [
        ([3.0, 3.0, 3.0], [True, True, True]),
        ([0.1, 0.1, 0.1], [True, True, True]),
        ([7.0, math.nan, math.inf], [True, False, False]),
        ([math.nan, 1.0, 2.0], [False, False, False]),
    ],
)
def test_whitening_equal_single_or_no_tokens_gives_zero(x, mask) -> None:
    white = whiten(torch.tensor([x]), torch.tensor([mask]))
    assert white[0].tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-11)


def test_whitening_ignores_garbage_in_masked_slots() -> None:
    mask = torch.tensor([[True, False, True, True]])
    clean = whiten(torch.tensor([[1.0, 0.0, 2.0, 4.0]]), mask)
    for garbage in (math.nan, math.inf, 1e38):
        assert torch.equal(clean, whiten(torch.tensor([[1.0, garbage, 2.0, 4.0]]), mask))


def test_whitening_of_huge_values_stays_finite() -> None:
    white = whiten(torch.tensor([[1e30, -1e30]]), torch.ones(1, 2, dtype=torch.bool))
    assert white[0].tolist() == pytest.approx([1.0, -1.0])


def test_whitening_keeps_a_nan_on_a_trained_token_visible() -> None:
    mask = torch.tensor([[True, True, False]])
    white = whiten(torch.tensor([[1.0, math.nan, 2.0]]), mask)
    assert white.isnan().tolist() == [[True, True, False]]


GROUPS = torch.tensor([7, 3, 7, 3, 7])
SCORES = torch.tensor([1.0, 10.0, 2.0, 14.0, 6.0])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Group 7 is 1, 2, 6: mean 3, sample variance (4+1+9)/2 = 7. Group 3 is 10, 14: mean 12,
        # sample variance 8.
        ("dr_grpo", [-2.0, -2.0, -1.0, 2.0, 3.0]),
        ("grpo", [-0.7559289, -0.7071068, -0.3779645, 0.7071068, 1.1338934]),
        # 1 - (2+6)/2; 10 - 14; 2 - (1+6)/2; 14 - 10; 6 - (1+2)/2
        ("rloo", [-3.0, -4.0, -1.5, 4.0, 4.5]),
    ],
)
def test_group_advantages_by_hand(kind, expected) -> None:
    # The grpo epsilon of 1e-6 moves these by 4e-7 at most.
    assert group_advantages(SCORES, GROUPS, kind=kind).tolist() == pytest.approx(expected, abs=1e-6)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5, width=32)), min_size=1, max_size=16))
def test_group_advantages_match_a_loop_over_siblings(samples) -> None:
    ids, scores = torch.tensor([i for i, _ in samples]), torch.tensor([s for _, s in samples])
    got = {k: group_advantages(scores, ids, kind=k).tolist() for k in ("grpo", "dr_grpo", "rloo")}
    for b, (own_id, own) in enumerate(samples):
        group = [s for i, s in samples if i == own_id]
        others = [s for j, (i, s) in enumerate(samples) if i == own_id and j != b]
        if not others:
            assert got["grpo"][b] == got["dr_grpo"][b] == got["rloo"][b] == 0.0
            continue
        centred = own - statistics.fmean(group)
        assert got["dr_grpo"][b] == pytest.approx(centred, rel=1e-6, abs=1e-6)
        assert got["rloo"][b] == pytest.approx(own - statistics.fmean(others), rel=1e-6, abs=1e-6)
        normal = centred / (statistics.stdev(group) + 1e-6)
        assert got["grpo"][b] == pytest.approx(normal, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_a_response_without_siblings_has_no_advantage(kind) -> None:
    assert group_advantages(torch.tensor([5.0]), torch.tensor([0]), kind=kind).tolist() == [0.0]


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_equal_scores_have_no_advantage_even_when_their_mean_is_rounded(kind) -> None:
    advantages = group_advantages(
        torch.full((3,), 0.1), torch.zeros(3, dtype=torch.long), kind=kind
    )
    assert advantages.tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-10)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_group_advantages_do_not_depend_on_the_order_of_samples(kind) -> None:
    order = torch.tensor([4, 1, 0, 3, 2])
    plain = group_advantages(SCORES, GROUPS, kind=kind)
    shuffled = group_advantages(SCORES[order], GROUPS[order], kind=kind)
    assert shuffled.tolist() == pytest.approx(plain[order].tolist(), rel=1e-6)


def test_a_nan_score_spoils_its_own_group_only() -> None:
    scores = torch.tensor([1.0, math.nan, 2.0, 4.0])
    advantages = group_advantages(scores, torch.tensor([0, 0, 1, 1]), kind="rloo")
    assert advantages.isnan().tolist() == [True, True, False, False]


def test_group_advantages_of_huge_scores_stay_finite() -> None:
    advantages = group_advantages(torch.tensor([1e30, -1e30]), torch.tensor([0, 0]), kind="grpo")
    assert advantages.tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])


def test_group_advantages_of_no_sample_are_empty() -> None:
    none = group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long), kind="grpo")
    assert none.shape == (0,)


def test_an_unknown_group_kind_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'reinforce'; known: dr_grpo, grpo, rloo"):
        group_advantages(SCORES, GROUPS, kind="reinforce")
