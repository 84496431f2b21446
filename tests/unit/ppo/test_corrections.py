"""Engine against trainer: figures by hand, weights against the exact expectation, rejection."""

import itertools
import math

import pytest
import torch

from megappo.ppo.corrections import (
    LEVELS,
    effective_share,
    importance_weights,
    kept_tokens,
    log_ratio,
    mismatch,
)
from megappo.ppo.losses import policy_loss

LN2 = math.log(2.0)
MASK = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
D = torch.tensor([[LN2, -LN2, 2 * LN2], [0.0, -3 * LN2, 0.0], [0.0, 0.0, 0.0]])


def means(found):
    return {name: total / count for name, (total, count) in found.means.items() if count}


def test_the_log_ratio_is_trainer_minus_engine_and_zero_where_masked():
    old = torch.tensor([[-1.0, -2.0, math.nan]], requires_grad=True)
    rollout = torch.tensor([[-1.5, -1.0, 7.0]])
    d = log_ratio(old, rollout, torch.tensor([[True, True, False]]))
    assert d.tolist() == [[0.5, -1.0, 0.0]]
    assert not d.requires_grad


def test_figures_by_hand():
    """Tokens weigh 2, 1/2, 4, 1, 1/8; the samples with a token 4 and 1/8."""
    old = torch.full((3, 3), -5.0)
    found = mismatch(old, old - D, MASK)
    figures = means(found)
    assert figures["diff"] == pytest.approx(7 * LN2 / 5)
    assert figures["share"] == pytest.approx(4 / 5)
    # exp(d) - d - 1 at each token.
    k3 = (2 + 0.5 + 4 + 1 + 0.125 - 5) - (1 - 1 + 2 + 0 - 3) * LN2
    assert figures["k3"] == pytest.approx(k3 / 5, rel=1e-6)
    assert figures["token_weight"] == pytest.approx(7.625 / 5)
    assert figures["token_weight_sq"] == pytest.approx((4 + 0.25 + 16 + 1 + 1 / 64) / 5)
    assert figures["sequence_weight"] == pytest.approx((4 + 1 / 8) / 2)
    assert figures["sequence_weight_sq"] == pytest.approx((16 + 1 / 64) / 2)
    assert found.diff_max == pytest.approx(3 * LN2)


def test_figures_add_up_over_ranks():
    generator = torch.Generator().manual_seed(3)
    old, rollout = torch.randn(2, 6, 5, generator=generator)
    mask = torch.rand(6, 5, generator=generator) > 0.4
    whole = mismatch(old, rollout, mask)
    parts = [mismatch(old[r], rollout[r], mask[r]) for r in (slice(0, 2), slice(2, 6))]
    for name, (total, count) in whole.means.items():
        sums = [sum(part.means[name][i] for part in parts) for i in (0, 1)]
        assert sums == [pytest.approx(total, rel=1e-12), count], name
    assert whole.diff_max == max(part.diff_max for part in parts)


def test_figures_ignore_padding_and_survive_an_empty_batch():
    old = torch.full((3, 3), -5.0)
    rollout = torch.where(MASK, old - D, math.nan)
    assert mismatch(old, rollout, MASK) == mismatch(old, old - D, MASK)
    nothing = mismatch(old, rollout, torch.zeros_like(MASK))
    assert set(nothing.means.values()) == {(0.0, 0.0)}
    assert nothing.diff_max == 0.0


def test_a_nan_shows_in_every_figure_that_it_concerns():
    old = torch.tensor([[-1.0, math.nan]])
    found = mismatch(old, torch.full((1, 2), -1.0), torch.ones(1, 2, dtype=torch.bool))
    assert found.diff_max == math.inf
    for name in ("diff", "k3", "token_weight", "sequence_weight_sq"):
        assert math.isnan(found.means[name][0]), name


def test_a_huge_gap_stays_finite():
    found = mismatch(torch.zeros(1, 2), torch.tensor([[-500.0, 90.0]]), torch.ones(1, 2).bool())
    assert all(math.isfinite(total) for total, _ in found.means.values())
    assert found.diff_max == 500.0


def test_the_effective_share_is_one_for_equal_weights_and_1_over_n_for_a_single_one():
    assert effective_share(3.0, 9.0) == 1.0
    assert effective_share(1 / 8, 1 / 8) == 1 / 8  # one weight 1, seven 0
    assert effective_share(0.0, 0.0) == 0.0
    assert math.isnan(effective_share(math.nan, math.nan))


def test_weights_by_hand():
    token = importance_weights(D, MASK, level="token", threshold=3.0)
    assert token.tolist() == [
        pytest.approx([2.0, 0.5, 3.0]), pytest.approx([1.0, 0.125, 0.0]), [0.0, 0.0, 0.0],
    ]  # fmt: skip
    sequence = importance_weights(D, MASK, level="sequence", threshold=3.0)
    assert sequence.tolist() == [
        pytest.approx([3.0, 3.0, 3.0]), pytest.approx([0.125, 0.125, 0.0]), [0.0, 0.0, 0.0],
    ]  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
def test_equal_log_probs_weigh_exactly_one_and_reject_nothing(level):
    weights = importance_weights(torch.zeros(3, 3), MASK, level=level, threshold=1.5)
    assert torch.equal(weights, MASK.float())
    kept = kept_tokens(torch.zeros(3, 3), MASK, level=level, threshold=1.0001)
    assert torch.equal(kept, MASK)


def test_rejection_by_hand():
    # The sample sums are 2 ln 2 and -3 ln 2.
    token = kept_tokens(D, MASK, level="token", threshold=2.5)
    assert token.tolist() == [[True, True, False], [True, False, False], [False] * 3]
    sequence = kept_tokens(D, MASK, level="sequence", threshold=5.0)
    assert sequence.tolist() == [[True] * 3, [False] * 3, [False] * 3]


@pytest.mark.parametrize("level", LEVELS)
def test_corrections_ignore_padding_and_do_not_hide_a_nan(level):
    padded = torch.where(MASK, D, math.nan)
    for function in (importance_weights, kept_tokens):
        expected = function(D, MASK, level=level, threshold=2.0)
        assert torch.equal(function(padded, MASK, level=level, threshold=2.0), expected)
    broken = torch.tensor([[math.nan, 0.0]])
    both = torch.ones(1, 2, dtype=torch.bool)
    weights = importance_weights(broken, both, level=level, threshold=2.0)
    assert math.isnan(weights[0, 0])
    assert kept_tokens(broken, both, level=level, threshold=2.0)[0, 0]


def test_extreme_ratios_give_finite_weights():
    d = torch.tensor([[1000.0, -1000.0]])
    both = torch.ones(1, 2, dtype=torch.bool)
    weights = importance_weights(d, both, level="token", threshold=2.0)
    assert weights.tolist() == [[2.0, pytest.approx(math.exp(-20.0))]]


def test_wrong_settings_are_refused():
    for function in (importance_weights, kept_tokens):
        with pytest.raises(ValueError, match="unknown level 'word'; known: token, sequence"):
            function(D, MASK, level="word", threshold=2.0)
    with pytest.raises(ValueError, match=r"> 0, got 0\.0"):
        importance_weights(D, MASK, level="token", threshold=0.0)
    with pytest.raises(ValueError, match=r"> 1, got 1\.0"):
        kept_tokens(D, MASK, level="token", threshold=1.0)


VOCABULARY = 3


class TinyPolicy:
    """A response is `length` tokens; each token's distribution depends on all before it."""

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.length = length
        self.logits = {
            before: torch.randn(VOCABULARY, generator=generator).requires_grad_()
            for n in range(length)
            for before in itertools.product(range(VOCABULARY), repeat=n)
        }

    @property
    def responses(self):
        return list(itertools.product(range(VOCABULARY), repeat=self.length))

    def log_probs(self):
        """[B, T] of every response there is."""
        return torch.stack(
            [
                torch.stack([self.logits[r[:t]].log_softmax(-1)[r[t]] for t in range(self.length)])
                for r in self.responses
            ]
        )

    def gradient_of(self, value):
        return torch.cat(torch.autograd.grad(value, list(self.logits.values())))


def expected_loss_under_engine(policy, engine, rewards, *, level, threshold):
    """The weighted loss, averaged over the engine's distribution by counting all responses."""
    new, drawn_from = policy.log_probs(), engine.log_probs().detach()
    mask = torch.ones_like(new, dtype=torch.bool)
    pg = policy_loss(
        new, new.detach(), rewards[:, None].expand_as(new), mask,
        clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0,
    )  # fmt: skip
    d = log_ratio(new, drawn_from, mask)
    weights = importance_weights(d, mask, level=level, threshold=threshold)
    chance = drawn_from.sum(dim=-1).exp()
    return (chance[:, None] * pg.loss * weights).sum()


@pytest.mark.parametrize(("level", "length"), [("token", 1), ("sequence", 1), ("sequence", 2)])
def test_weights_turn_the_engines_expectation_into_the_trainers(level, length):
    """Value and gradient, against J = sum p(response) reward(response) differentiated directly."""
    policy, engine = TinyPolicy(length, seed=1), TinyPolicy(length, seed=2)
    rewards = torch.randn(VOCABULARY**length, generator=torch.Generator().manual_seed(3))
    found = expected_loss_under_engine(policy, engine, rewards, level=level, threshold=1e6)
    objective = (policy.log_probs().sum(dim=-1).exp() * rewards).sum()
    assert found.item() == pytest.approx(-length * objective.item(), rel=1e-5)
    gradient = policy.gradient_of(found)
    assert torch.allclose(gradient, -policy.gradient_of(objective), rtol=1e-5, atol=1e-6)
    assert gradient.abs().max() > 0.01


def test_without_weights_or_with_truncation_the_gradient_is_another_one():
    """So the test above can fail: the two policies are far enough apart."""
    policy, engine = TinyPolicy(2, seed=1), TinyPolicy(2, seed=2)
    rewards = torch.randn(VOCABULARY**2, generator=torch.Generator().manual_seed(3))
    exact = policy.gradient_of((policy.log_probs().sum(dim=-1).exp() * rewards).sum())
    for level, threshold in (("token", 1e6), ("sequence", 1.1), ("token", 1e-3)):
        loss = expected_loss_under_engine(policy, engine, rewards, level=level, threshold=threshold)
        assert not torch.allclose(policy.gradient_of(loss), -exact, atol=0.01), (level, threshold)


def test_the_token_level_corrects_each_token_given_those_before_it():
    """Averaged over the engine's prefixes, the step of the second token is exact."""
    policy, engine = TinyPolicy(2, seed=1), TinyPolicy(2, seed=2)
    rewards = torch.randn(VOCABULARY**2, generator=torch.Generator().manual_seed(3))
    loss = expected_loss_under_engine(policy, engine, rewards, level="token", threshold=1e6)
    names = [before for before in policy.logits if len(before) == 1]
    found = torch.autograd.grad(loss, [policy.logits[n] for n in names])
    for (first,), gradient in zip(names, found, strict=True):
        reached = engine.logits[()].softmax(-1)[first].item()
        second = policy.logits[(first,)].softmax(-1)
        value = (second * rewards[first * VOCABULARY : (first + 1) * VOCABULARY]).sum()
        exact = torch.autograd.grad(value, policy.logits[(first,)])[0]
        assert torch.allclose(gradient, -reached * exact, rtol=1e-5, atol=1e-6)
