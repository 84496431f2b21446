"""Estimators and policy losses against a policy small enough to be enumerated.

Two steps, three tokens: nine responses, each with a probability, a reward at each step, and the
exact gradient of the expected reward in float64. An estimator's expected gradient is a sum over
every response, or every pair of siblings.
"""

import itertools

import pytest
import torch

from megappo.ppo.advantages import compute_gae, group_advantages, whiten
from megappo.ppo.cispo import cispo_loss
from megappo.ppo.gspo import gspo_loss, sequence_log_ratio
from megappo.ppo.losses import policy_loss
from megappo.ppo.returns import outcomes, returns_to_go, spread
from megappo.ppo.rewards import token_rewards
from megappo.ppo.sapo import sapo_loss

RESPONSES = torch.tensor(list(itertools.product(range(3), range(3))))  # [9, 2]
THETA = torch.randn(4, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
"""Logits of the first token, and of the second after each first one."""
REWARDS = torch.tensor(
    [[0.0, 1.0], [0.0, -2.0], [0.0, 0.5], [1.0, 3.0], [1.0, 0.0], [1.0, 0.25], [-1.0, 2.0],
     [-1.0, 1.0], [-1.0, 6.0]], dtype=torch.float64,
)  # fmt: skip
"""[9, 2]: the first depends on the first token alone."""
SHIFT = torch.randn(4, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64) / 2
"""What the policy has moved by since its samples were drawn."""
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


def kl_in_the_reward(kind):
    """Expected gradient of REINFORCE on R less 0.3 KL, estimated from the sampled tokens alone."""
    _, mask, p = everything()
    now, ref = log_probs(THETA, RESPONSES), log_probs(THETA + SHIFT, RESPONSES)
    rewards, _ = token_rewards(
        outcomes(REWARDS, mask), mask, log_probs=now, ref_log_probs=ref, kl_coef=0.3, kl_kind=kind
    )
    return expected_gradient(RESPONSES, p, returns_to_go(rewards, mask, gamma=1.0))


def reward_less_kl(theta):
    """Expected R less 0.3 times the exact KL of whole responses."""
    new, ref = log_probs(theta, RESPONSES), log_probs(THETA + SHIFT, RESPONSES)
    kl = (new - ref).sum(dim=-1)
    return (probabilities(theta) * (REWARDS.sum(dim=-1) - 0.3 * kl)).sum()


def test_k1_in_the_reward_has_the_gradient_of_the_exact_kl():
    expected = gradient_of(reward_less_kl)
    assert_equal(kl_in_the_reward("k1"), expected)
    assert (expected - TRUE).abs().max() > 1e-2


def test_k3_in_the_reward_is_off_by_the_gradient_that_it_has_as_a_loss():
    """Its value is the KL's, but part of the KL's gradient is that of the estimate itself."""

    def as_a_loss(theta):
        r = log_probs(THETA + SHIFT, RESPONSES) - log_probs(theta, RESPONSES)
        return (probabilities(THETA) * (r.exp() - r - 1).sum(dim=-1)).sum()

    bias = 0.3 * gradient_of(as_a_loss)
    assert bias.abs().max() > 1e-2
    assert_equal(kl_in_the_reward("k3"), gradient_of(reward_less_kl) + bias)


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


def moved_gradient(loss, *, divide_by_length=False):
    """Expected gradient and value of a loss after the policy has moved, over all responses.

    Samples and old log-probs are those of THETA, the gradient is at THETA + SHIFT.
    """
    theta = (THETA + SHIFT).requires_grad_()
    now, old = log_probs(theta, RESPONSES), log_probs(THETA, RESPONSES)
    mask = torch.ones(9, 2, dtype=torch.bool)
    advantages = spread(REWARDS.sum(dim=-1) - 1.0, mask)
    per_token = loss(now, old, advantages, mask)
    value = (per_token.sum(dim=-1) * probabilities(THETA)).sum() / (2 if divide_by_length else 1)
    value.backward()
    return value.item(), theta.grad


def oracle(objective):
    """The same from an objective per response in float64: (log-probs, old, R - 1) -> [9]."""
    theta = (THETA + SHIFT).requires_grad_()
    now, old = log_probs(theta, RESPONSES), log_probs(THETA, RESPONSES)
    value = -(objective(now, old, REWARDS.sum(dim=-1) - 1.0) * probabilities(THETA)).sum()
    value.backward()
    return value.item(), theta.grad


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    assert_equal(found[1], expected[1])


def clip(ratio):
    return ratio.clamp(0.8, 1.3)


def test_ppo_is_the_enumerated_clipped_objective():
    def objective(now, old, a):
        ratio, a = (now - old).exp(), a[:, None]
        return torch.minimum(ratio * a, clip(ratio) * a).sum(dim=-1)

    def loss(*tensors):
        clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": None}
        return policy_loss(*tensors, **clips).loss

    assert_same(moved_gradient(loss), oracle(objective))


def test_dual_clip_is_the_enumerated_objective_with_a_floor_where_advantages_are_negative():
    """Ye 2020, eq. 5: for A < 0 the objective is at least c A, and has no gradient below that."""
    c = 1.5

    def objective(now, old, a):
        ratio, a = (now - old).exp(), a[:, None]
        clipped = torch.minimum(ratio * a, clip(ratio) * a)
        return torch.where(a < 0, torch.maximum(clipped, c * a), clipped).sum(dim=-1)

    def loss(*tensors, bound=c):
        clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": bound}
        return policy_loss(*tensors, **clips).loss

    assert_same(moved_gradient(loss), oracle(objective))
    value, gradient = moved_gradient(lambda *tensors: loss(*tensors, bound=None))
    assert value - moved_gradient(loss)[0] > 1e-2, "the floor is reached"
    assert (gradient - moved_gradient(loss)[1]).abs().max() > 1e-2


def test_gspo_is_the_enumerated_objective_of_whole_responses():
    """Its value and its gradient, though it is computed token by token."""

    def objective(now, old, a):
        s = (now - old).mean(dim=-1).exp()
        return torch.minimum(s * a, clip(s) * a)

    def loss(now, old, advantages, mask):
        total, count = sequence_log_ratio(now, old, mask)
        return gspo_loss(
            now, old, advantages, mask, mean_log_ratio=total / count,
            clip_ratio_low=0.2, clip_ratio_high=0.3,
        ).loss  # fmt: skip

    assert_same(moved_gradient(loss, divide_by_length=True), oracle(objective))


def test_cispo_is_the_enumerated_gradient_with_clipped_weights():
    def objective(now, old, a):
        weight = clip((now - old).exp()).detach()
        return (weight * now).sum(dim=-1) * a

    def loss(*tensors):
        return cispo_loss(*tensors, clip_ratio_low=0.2, clip_ratio_high=0.3).loss

    assert_equal(moved_gradient(loss)[1], oracle(objective)[1])
    p, old = probabilities(THETA), log_probs(THETA, RESPONSES)
    weights = clip((log_probs(THETA + SHIFT, RESPONSES) - old).exp()).sum(dim=-1)
    value = -(p * weights * (REWARDS.sum(dim=-1) - 1.0)).sum()
    assert moved_gradient(loss)[0] == pytest.approx(value.item(), abs=1e-6)


def test_sapo_is_the_enumerated_objective_with_soft_gates():
    def objective(now, old, a):
        tau = torch.where(a > 0, 1.0, 2.0)[:, None]
        gate = 4 / tau / (1 + (-tau * ((now - old).exp() - 1)).exp())
        return gate.sum(dim=-1) * a

    def loss(*tensors):
        return sapo_loss(*tensors, tau_pos=1.0, tau_neg=2.0).loss

    assert_same(moved_gradient(loss), oracle(objective))


def test_the_clipped_losses_differ_where_the_policy_has_moved_far():
    """PPO's clip takes gradients away that CISPO keeps: the bias that each of them documents."""

    def ppo(*tensors):
        clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": None}
        return policy_loss(*tensors, **clips).loss

    def cispo(*tensors):
        return cispo_loss(*tensors, clip_ratio_low=0.2, clip_ratio_high=0.3).loss

    def unclipped(*tensors):
        return policy_loss(*tensors, **NO_CLIP).loss

    found = [moved_gradient(loss)[1] for loss in (ppo, cispo, unclipped)]
    for one, other in itertools.combinations(found, 2):
        assert (one - other).abs().max() > 1e-2
