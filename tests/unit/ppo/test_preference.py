"""The Bradley-Terry loss: by hand, against an independent form, at extremes, and its gradient."""

import math

import pytest
import torch

from megappo.ppo.preference import bradley_terry


def test_the_loss_is_minus_the_log_of_the_probability_that_the_better_one_wins():
    found = bradley_terry(torch.tensor([2.0, 0.0, -1.0]), torch.tensor([0.5, 0.0, 1.0]))
    expected = [-math.log(1 / (1 + math.exp(-d))) for d in (1.5, 0.0, -2.0)]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_margin_must_be_led_by():
    chosen, rejected = torch.tensor([2.0]), torch.tensor([0.5])
    found = bradley_terry(chosen, rejected, margins=torch.tensor([1.5]))
    assert found.item() == pytest.approx(math.log(2), rel=1e-6)


def test_centring_adds_the_square_of_the_sum():
    chosen, rejected = torch.tensor([2.0, 1.0]), torch.tensor([1.0, -1.0])
    plain = bradley_terry(chosen, rejected)
    found = bradley_terry(chosen, rejected, center_coef=0.5)
    assert (found - plain).tolist() == pytest.approx([4.5, 0.0], rel=1e-6)


def test_only_the_difference_counts_without_centring():
    chosen, rejected = torch.tensor([2.0, -3.0]), torch.tensor([0.5, 1.0])
    shifted = bradley_terry(chosen + 8, rejected + 8)
    assert torch.allclose(shifted, bradley_terry(chosen, rejected), rtol=1e-6)


def test_far_scores_give_finite_losses_and_gradients():
    chosen = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = bradley_terry(chosen, -chosen.detach())
    loss.sum().backward()
    assert loss.tolist() == [0.0, 2e4]
    assert chosen.grad.tolist() == [0.0, -1.0]


def test_the_gradient_is_the_probability_of_being_wrong():
    torch.manual_seed(0)
    chosen = torch.randn(5, dtype=torch.float64, requires_grad=True)
    rejected = torch.randn(5, dtype=torch.float64, requires_grad=True)
    bradley_terry(chosen, rejected, margins=torch.full((5,), 0.3)).sum().backward()
    wrong = torch.sigmoid(rejected + 0.3 - chosen).detach()
    assert torch.allclose(chosen.grad, -wrong, rtol=1e-9)
    assert torch.allclose(rejected.grad, wrong, rtol=1e-9)
    assert torch.autograd.gradcheck(
        lambda a, b: bradley_terry(a, b, center_coef=0.1),
        (chosen.detach().requires_grad_(), rejected.detach().requires_grad_()),
    )


def test_a_negative_coefficient_is_refused():
    with pytest.raises(ValueError, match="-1"):
        bradley_terry(torch.zeros(1), torch.zeros(1), center_coef=-1)
