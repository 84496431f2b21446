"""GSPO, CISPO and SAPO by hand, and with garbage around them."""

import math

import pytest
import torch

from megappo.ppo.cispo import cispo_loss
from megappo.ppo.gspo import gspo_loss, sequence_log_ratio
from megappo.ppo.sapo import sapo_loss


def gspo(log_probs, old, advantages, mask, *, low=0.2, high=0.2):
    total, count = sequence_log_ratio(log_probs, old, mask)
    return gspo_loss(
        log_probs, old, advantages, mask, mean_log_ratio=total / count.clamp(min=1),
        clip_ratio_low=low, clip_ratio_high=high,
    )  # fmt: skip


def cispo(log_probs, old, advantages, mask):
    return cispo_loss(log_probs, old, advantages, mask, clip_ratio_low=0.2, clip_ratio_high=0.2)


def sapo(log_probs, old, advantages, mask):
    return sapo_loss(log_probs, old, advantages, mask, tau_pos=1.0, tau_neg=1.05)


ALL = [gspo, cispo, sapo]


def one_token(loss, advantage, ratio):
    """Loss, its gradient by the log-prob, and metrics."""
    log_prob = torch.tensor([[math.log(ratio)]], requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.bool)
    found = loss(log_prob, torch.zeros(1, 1), torch.tensor([[advantage]]), one)
    found.loss.sum().backward()
    metrics = {name: (total / count).item() for name, (total, count) in found.metrics.items()}
    return found.loss.item(), log_prob.grad.item(), metrics


def soft(ratio, tau):
    return 1 / (1 + math.exp(-tau * (ratio - 1)))


@pytest.mark.parametrize(
    ("loss", "advantage", "ratio", "value", "gradient", "clipped"),
    [
        (gspo, 1.0, 1.1, -1.1, -1.1, 0.0),
        (gspo, 1.0, 1.5, -1.2, 0.0, 1.0),
        (gspo, -1.0, 1.5, 1.5, 1.5, 0.0),
        (gspo, -1.0, 0.5, 0.8, 0.0, 1.0),
        (cispo, 1.0, 1.1, -1.1, -1.1, 0.0),
        (cispo, 1.0, 1.5, -1.2, -1.2, 1.0),  # PPO would leave this token out
        (cispo, -1.0, 0.5, 0.8, 0.8, 1.0),
        (sapo, 1.0, 1.5, -4 * soft(1.5, 1), -4 * 1.5 * soft(1.5, 1) * soft(-0.5 + 1, 1), 0.0),
        (sapo, -1.0, 3.0, 4 / 1.05 * soft(3, 1.05),
         4 * 3 * soft(3, 1.05) * (1 - soft(3, 1.05)), 1.0),
    ],
)  # fmt: skip
def test_one_token_by_hand(loss, advantage, ratio, value, gradient, clipped):
    found, slope, metrics = one_token(loss, advantage, ratio)
    assert found == pytest.approx(value, rel=1e-6)
    assert slope == pytest.approx(gradient, rel=1e-5)
    assert metrics["pg_clipfrac"] == clipped
    assert metrics["ppo_kl"] == pytest.approx(-math.log(ratio), rel=1e-6)
    assert metrics["ratio_mean"] == pytest.approx(ratio, rel=1e-6)


@pytest.mark.parametrize("loss", ALL)
def test_an_unchanged_policy_has_the_plain_policy_gradient(loss):
    log_probs = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    advantages = torch.tensor([[1.0, 1.0], [-2.0, -2.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    found = loss(log_probs, log_probs.detach(), advantages, mask)
    found.loss.sum().backward()
    assert torch.allclose(log_probs.grad, -advantages, atol=1e-6)


@pytest.mark.parametrize("loss", ALL)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e38])
def test_masked_slots_change_neither_value_nor_gradient(loss, garbage):
    mask = torch.tensor([[True, False, True]])
    clean = torch.tensor([[-1.0, 0.0, -2.0]], requires_grad=True)
    dirty = torch.tensor([[-1.0, garbage, -2.0]], requires_grad=True)
    old, advantages = torch.tensor([[-1.2, 0.0, -1.5]]), torch.tensor([[1.0, 0.0, -1.0]])
    expected = loss(clean, old, advantages, mask)
    found = loss(dirty, old + torch.tensor([[0.0, garbage, 0.0]]), advantages, mask)
    expected.loss.sum().backward()
    found.loss.sum().backward()
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(dirty.grad, clean.grad)
    assert dirty.grad[0, 1] == 0


@pytest.mark.parametrize("loss", ALL)
@pytest.mark.parametrize("log_prob", [-300.0, 0.0])
def test_far_ratios_are_finite(loss, log_prob):
    now = torch.tensor([[log_prob]], requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.bool)
    found = loss(now, torch.tensor([[-150.0]]), torch.tensor([[-1.0]]), one).loss.sum()
    found.backward()
    assert math.isfinite(found.item())
    assert math.isfinite(now.grad.item())


def test_a_responses_ratio_is_the_geometric_mean_of_its_trained_tokens():
    now = torch.tensor([[math.log(4.0), 9.0, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, False, True], [False, False, False]])
    found = gspo(now, torch.zeros(2, 3), torch.ones(2, 3), mask, high=5.0)
    assert found.loss.tolist()[0] == pytest.approx([-2.0, 0.0, -2.0])
    assert found.loss.tolist()[1] == [0.0, 0.0, 0.0]


def test_a_response_in_two_parts_has_the_ratio_of_the_whole():
    """What context-parallel ranks sum."""
    now, old = torch.tensor([[0.3, -0.2, 0.5]]), torch.zeros(1, 3)
    whole = torch.ones(1, 3, dtype=torch.bool)
    parts = [torch.tensor([[True, False, True]]), torch.tensor([[False, True, False]])]
    sums = [sequence_log_ratio(now, old, part) for part in parts]
    total, count = (sum(values) for values in zip(*sums, strict=True))
    expected = sequence_log_ratio(now, old, whole)
    assert total.item() == pytest.approx(expected[0].item())
    assert count.item() == expected[1].item() == 3
