"""Estimators and policy losses against a policy small enough to be enumerated.

Two steps, three tokens: nine responses, each with a probability, a reward at each step, and the
exact gradient of the expected reward in float64. An estimator's expected gradient is a sum over
every response, or every pair of siblings.
"""

import itertools

import torch

from megappo.ppo.advantages import compute_gae, group_advantages, whiten
from megappo.ppo.losses import policy_loss
from megappo.ppo.returns import outcomes, returns_to_go, spread

RESPONSES = torch.tensor(list(itertools.product(range(3), range(3))))  # [9, 2]
THETA = torch.randn(4, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
"""Logits of the first token, and of the second after each first one."""
REWARDS = torch.tensor(
    [[0.0, 1.0], [0.0, -2.0], [0.0, 0.5], [1.0, 3.0], [1.0, 0.0], [1.0, 0.25], [-1.0, 2.0],
     [-1.0, 1.0], [-1.0, 6.0]], dtype=torch.float64,
)  # fmt: skip
"""[9, 2]: the first depends on the first token alone."""
NO_CLIP = {"clip_ratio_low": 1.0, "clip_ratio_high": 1e6, "clip_ratio_c": None}


def log_probs(theta, responses):
    """[B, 2] of each token."""
    first = theta[0].log_softmax(-1)[responses[:, 0]]
    second = theta[1:].log_softmax(-1)[responses[:, 0], responses[:, 1]]
    return torch.stack([first, second], dim=-1)


def probabilities(theta):
    return log_probs(theta, RESPONSES).sum(dim=-1).exp()


def gradient_of(objective):
    theta = THETA.clone().requires_grad_()
    objective(theta).backward()
    return theta.grad


TRUE = gradient_of(lambda theta: (probabilities(theta) * REWARDS.sum(dim=-1)).sum())


def expected_gradient(responses, weights, advantages):
    """Of the negated PPO loss with sums over tokens, before any update.

    Args:
        responses: [B, 2].
        weights: [B] probability of each, over the number of siblings.
        advantages: [B, 2].
    """
    theta = THETA.clone().requires_grad_()
    now = log_probs(theta, responses)
    mask = torch.ones(responses.shape, dtype=torch.bool)
    loss = policy_loss(now, now.detach(), advantages, mask, **NO_CLIP).loss
    (-(loss.sum(dim=-1) * weights).sum()).backward()
    return theta.grad


def everything():
    """Every response once: (rewards, mask, probabilities)."""
    mask = torch.ones(9, 2, dtype=torch.bool)
    return REWARDS.float(), mask, probabilities(THETA)


def of_pairs(kind, *, moments=None):
    """The expected gradient of an estimator over every pair of siblings."""
    first, second = (
        torch.tensor(i) for i in zip(*itertools.product(range(9), range(9)), strict=True)
    )
    which = torch.stack([first, second], dim=-1).flatten()  # [162]
    p = probabilities(THETA)
    weights = (p[first] * p[second]).repeat_interleave(2) / 2
    mask = torch.ones(162, 2, dtype=torch.bool)
    scores = outcomes(REWARDS[which], mask)
    found = group_advantages(scores, torch.arange(162) // 2, kind=kind)
    if moments is not None:
        found = whiten(found[:, None], mask[:, :1], moments=moments)[:, 0]
    return expected_gradient(RESPONSES[which], weights, spread(found, mask))


def assert_equal(found, expected):
    assert expected.abs().max() > 0.05
    assert (found - expected).abs().max() < 1e-6


def test_the_true_gradient_is_not_trivial():
    assert TRUE.abs().min() > 1e-3


def test_gae_without_decay_has_the_true_gradient_whatever_the_values():
    rewards, mask, p = everything()
    values = torch.tensor([[0.7, float(first)] for first in RESPONSES[:, 0]])
    advantages, _ = compute_gae(rewards, values, mask, gamma=1.0, lam=1.0)
    assert_equal(expected_gradient(RESPONSES, p, advantages), TRUE)


def test_gae_with_decay_has_it_only_if_the_values_are_right():
    rewards, mask, p = everything()
    second = torch.stack([(p * REWARDS[:, 1])[3 * i : 3 * i + 3].sum() / p[3 * i : 3 * i + 3].sum()
                          for i in range(3)])  # fmt: skip
    right = torch.stack(
        [(p * REWARDS.sum(dim=-1)).sum().expand(9), second[RESPONSES[:, 0]]], dim=-1
    )
    advantages, _ = compute_gae(rewards, right.float(), mask, gamma=1.0, lam=0.3)
    assert_equal(expected_gradient(RESPONSES, p, advantages), TRUE)
    wrong = right.float() + torch.tensor([0.0, 1.0]) * RESPONSES[:, :1]
    advantages, _ = compute_gae(rewards, wrong, mask, gamma=1.0, lam=0.3)
    assert (expected_gradient(RESPONSES, p, advantages) - TRUE).abs().max() > 1e-2


def test_returns_to_go_have_the_true_gradient():
    rewards, mask, p = everything()
    advantages = returns_to_go(rewards, mask, gamma=1.0)
    assert_equal(expected_gradient(RESPONSES, p, advantages), TRUE)


def test_whitened_returns_have_the_true_gradient_over_their_deviation():
    rewards, mask, p = everything()
    returns = returns_to_go(rewards, mask, gamma=1.0)
    mean = (p[:, None] * returns).sum() / 2
    variance = (p[:, None] * (returns - mean).square()).sum() / 2
    advantages = whiten(returns, mask, moments=(mean, variance))
    assert_equal(expected_gradient(RESPONSES, p, advantages), TRUE / variance.sqrt())


def test_a_greedy_baseline_keeps_the_true_gradient():
    rewards, mask, p = everything()
    greedy = REWARDS.sum(dim=-1)[p.argmax()]
    advantages = spread(outcomes(rewards, mask) - greedy, mask)
    assert_equal(expected_gradient(RESPONSES, p, advantages), TRUE)


def test_leaving_one_out_has_the_true_gradient():
    assert_equal(of_pairs("rloo"), TRUE)


def test_a_mean_that_holds_the_sample_itself_shrinks_the_gradient_by_one_in_n():
    assert_equal(of_pairs("dr_grpo"), TRUE / 2)


def test_whitening_over_responses_divides_by_their_deviation():
    assert_equal(of_pairs("dr_grpo", moments=(0.0, 4.0)), TRUE / 4)


def test_grpo_of_two_siblings_climbs_how_often_a_response_beats_the_other():
    """(R - m) / s is half the difference over |difference| / sqrt(2): its sign, over sqrt(2)."""
    p, scores = probabilities(THETA), REWARDS.sum(dim=-1)
    wins = torch.sign(scores[:, None] - scores[None, :]) @ p

    expected = gradient_of(lambda theta: (probabilities(theta) * wins).sum()) / 2**0.5
    assert_equal(of_pairs("grpo"), expected)
    cosine = torch.cosine_similarity(expected.flatten(), TRUE.flatten(), dim=0)
    assert cosine < 0.99
