import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.ppo.losses import (
    LOSS_AGG_MODES,
    aggregation_weights,
    entropy_loss,
    kl_loss,
    local_denominator,
    policy_loss,
    value_loss,
)

CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
GARBAGE = [math.nan, math.inf, -math.inf, 1e38, -1e38]


def mean_of(metric: tuple[torch.Tensor, torch.Tensor]) -> float:
    return (metric[0] / metric[1]).item()


def policy_loss_of_token(advantage: float, ratio: float, **clips):
    """Loss, d loss / d log-prob and metrics of one token."""
    log_prob = torch.tensor([[math.log(ratio)]], requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.bool)
    result = policy_loss(log_prob, torch.zeros(1, 1), torch.tensor([[advantage]]), one, **clips)
    result.loss.sum().backward()
    return result.loss.item(), log_prob.grad.item(), result.metrics


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient", "clipped", "bounded"),
    [
        (1.0, 1.5, -1.2, 0.0, 1.0, 0.0),
        (-1.0, 10.0, 3.0, 0.0, 0.0, 1.0),
        (-1.0, 0.5, 0.8, 0.0, 1.0, 0.0),
        (-1.0, 1.5, 1.5, 1.5, 0.0, 0.0),
        (1.0, 0.5, -0.5, -0.5, 0.0, 0.0),
        (1.0, 10.0, -1.2, 0.0, 1.0, 0.0),
        (2.0, 1.1, -2.2, -2.2, 0.0, 0.0),
    ],
)
def test_policy_loss_of_one_token(advantage, ratio, loss, gradient, clipped, bounded) -> None:
    got_loss, got_gradient, metrics = policy_loss_of_token(advantage, ratio, **CLIPS)
    assert got_loss == pytest.approx(loss, rel=1e-6)
    assert got_gradient == pytest.approx(gradient, rel=1e-6)
    assert mean_of(metrics["pg_clipfrac"]) == clipped
    assert mean_of(metrics["pg_clipfrac_lower"]) == bounded
    assert mean_of(metrics["ppo_kl"]) == pytest.approx(-math.log(ratio), rel=1e-6)
    assert mean_of(metrics["ratio_mean"]) == pytest.approx(ratio, rel=1e-6)


def test_the_two_sides_of_the_clip_are_separate() -> None:
    clips = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}
    assert policy_loss_of_token(1.0, 1.5, **clips)[0] == pytest.approx(-1.3, rel=1e-6)
    assert policy_loss_of_token(-1.0, 0.5, **clips)[0] == pytest.approx(0.9, rel=1e-6)


def test_without_the_bound_a_negative_advantage_pays_the_whole_ratio() -> None:
    loss, gradient, metrics = policy_loss_of_token(-1.0, 10.0, **{**CLIPS, "clip_ratio_c": None})
    assert (loss, gradient) == pytest.approx((10.0, 10.0), rel=1e-6)
    assert mean_of(metrics["pg_clipfrac_lower"]) == 0.0


def surrogate_by_cases(advantage: float, ratio: float, low: float, high: float, c: float) -> float:
    """Which ratio counts, by the sign of the advantage instead of by max and min."""
    if advantage >= 0:
        return -advantage * min(ratio, 1 + high)
    return -advantage * min(max(ratio, 1 - low), c)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(-3, 3, width=32), st.floats(-4, 4, width=32)), min_size=1, max_size=8
    ),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(2.01, 10),
)
def test_policy_loss_matches_the_cases_by_sign(tokens, low, high, c) -> None:
    advantages, log_ratios = (torch.tensor([list(column)]) for column in zip(*tokens, strict=True))
    mask = torch.ones_like(advantages, dtype=torch.bool)
    result = policy_loss(
        log_ratios,
        torch.zeros_like(log_ratios),
        advantages,
        mask,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=c,
    )
    expected = [surrogate_by_cases(a, math.exp(d), low, high, c) for a, d in tokens]
    assert result.loss[0].tolist() == pytest.approx(expected, rel=2e-6, abs=1e-7)


def test_on_policy_gradient_is_that_of_the_expected_reward() -> None:
    # Two tokens of a vocabulary of two; every response is enumerated with its probability.
    theta = torch.tensor([[0.3, -0.2], [0.5, 0.1], [-0.4, 0.8]])
    reward = {(0, 0): 1.0, (0, 1): -2.0, (1, 0): 0.5, (1, 1): 3.0}

    def response_log_probs(table: torch.Tensor, response: tuple[int, int]) -> torch.Tensor:
        first = table[0].log_softmax(0)[response[0]]
        return torch.stack([first, table[1 + response[0]].log_softmax(0)[response[1]]])

    exact = theta.clone().requires_grad_()
    responses = list(itertools.product((0, 1), repeat=2))
    sum(response_log_probs(exact, y).sum().exp() * reward[y] for y in responses).backward()

    table = theta.clone().requires_grad_()
    log_probs = torch.stack([response_log_probs(table, y) for y in responses])
    advantages = torch.tensor([[reward[y]] * 2 for y in responses])
    mask = torch.ones(4, 2, dtype=torch.bool)
    result = policy_loss(log_probs, log_probs.detach(), advantages, mask, **CLIPS)
    probability = log_probs.detach().sum(dim=1, keepdim=True).exp()
    (probability * result.loss).sum().backward()
    torch.testing.assert_close(-table.grad, exact.grad, rtol=1e-5, atol=1e-7)


def test_an_unchanged_policy_has_ratio_one_and_no_clipping() -> None:
    log_probs = torch.tensor([[-0.1, -3.0, -17.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    metrics = policy_loss(log_probs, log_probs, torch.ones(1, 3), mask, **CLIPS).metrics
    assert mean_of(metrics["ratio_mean"]) == 1.0
    assert mean_of(metrics["ppo_kl"]) == 0.0
    assert mean_of(metrics["pg_clipfrac"]) == 0.0


MASK = torch.tensor([[True, False, True], [False, True, False]])


def losses_and_gradients(first, *others):
    """Every [B, T] loss of the module at once, with gradients of its first argument."""
    results = []
    for function in (
        lambda x, a, b: policy_loss(x, a, b, MASK, **CLIPS),
        lambda x, a, b: value_loss(x, a, b, MASK, clip_range=0.2),
        lambda x, a, b: kl_loss(x, a, MASK, kind="k3"),
        lambda x, a, b: kl_loss(x, a, MASK, kind="k3+"),
        lambda x, a, b: entropy_loss(x, MASK),
    ):
        x = first.clone().requires_grad_()
        result = function(x, *others)
        result.loss.sum().backward()
        metrics = [part for pair in result.metrics.values() for part in pair]
        results.append((result.loss.detach(), x.grad, torch.stack(metrics)))
    return results


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_in_masked_slots_changes_no_loss_gradient_or_metric(garbage) -> None:
    inputs = torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(1))
    clean = losses_and_gradients(*inputs)
    dirty = losses_and_gradients(*torch.where(MASK, inputs, torch.tensor(garbage)))
    for clean_parts, dirty_parts in zip(clean, dirty, strict=True):
        for a, b in zip(clean_parts, dirty_parts, strict=True):
            assert torch.equal(a, b)


def test_a_fully_masked_batch_has_zero_losses_and_zero_gradients() -> None:
    empty = torch.zeros(2, 3, dtype=torch.bool)
    x = torch.full((2, 3), math.nan, requires_grad=True)
    y = torch.full((2, 3), math.nan)
    for result in (
        policy_loss(x, y, y, empty, **CLIPS),
        value_loss(x, y, y, empty, clip_range=0.2),
        kl_loss(x, y, empty, kind="k3"),
        entropy_loss(x, empty),
    ):
        x.grad = None
        result.loss.sum().backward()
        assert torch.equal(result.loss, torch.zeros(2, 3))
        assert torch.equal(x.grad, torch.zeros(2, 3))
        assert all(total == 0 and count == 0 for total, count in result.metrics.values())


@pytest.mark.parametrize("log_ratio", [-1e6, -200.0, 200.0, 1e6])
@pytest.mark.parametrize("advantage", [-5.0, 0.0, 5.0])
@pytest.mark.parametrize("c", [3.0, None])
def test_policy_loss_of_extreme_ratios_is_finite(log_ratio, advantage, c) -> None:
    log_prob = torch.tensor([[log_ratio]], requires_grad=True)
    result = policy_loss(
        log_prob,
        torch.zeros(1, 1),
        torch.tensor([[advantage]]),
        torch.ones(1, 1, dtype=torch.bool),
        **{**CLIPS, "clip_ratio_c": c},
    )
    result.loss.sum().backward()
    assert result.loss.isfinite().all()
    assert log_prob.grad.isfinite().all()


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_nan_on_a_trained_token_stays_visible_in_the_policy_loss(position) -> None:
    inputs = [torch.zeros(1, 2) for _ in range(3)]
    inputs[position][0, 1] = math.nan
    result = policy_loss(*inputs, torch.ones(1, 2, dtype=torch.bool), **CLIPS)
    assert result.loss.isnan().tolist() == [[False, True]]


def test_losses_are_float32_for_half_precision_inputs() -> None:
    x = torch.zeros(1, 2, dtype=torch.bfloat16)
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert policy_loss(x, x, x, mask, **CLIPS).loss.dtype is torch.float32
    assert value_loss(x, x, x, mask, clip_range=0.5).loss.dtype is torch.float32


def test_only_the_first_argument_of_a_loss_carries_a_gradient() -> None:
    inputs = [torch.ones(1, 1, requires_grad=True) for _ in range(3)]
    mask = torch.ones(1, 1, dtype=torch.bool)
    (
        policy_loss(*inputs, mask, **CLIPS).loss + value_loss(*inputs, mask, clip_range=1.0).loss
    ).sum().backward()
    assert inputs[0].grad is not None
    assert inputs[1].grad is None
    assert inputs[2].grad is None


@pytest.mark.parametrize("c", [1.0, 0.5, -3.0, math.nan])
def test_a_dual_clip_that_would_cut_the_unchanged_policy_is_refused(c) -> None:
    with pytest.raises(ValueError, match="clip_ratio_c must be > 1, got"):
        policy_loss_of_token(1.0, 1.0, **{**CLIPS, "clip_ratio_c": c})


@pytest.mark.parametrize("name", ["clip_ratio_low", "clip_ratio_high"])
@pytest.mark.parametrize("value", [-0.1, math.nan])
def test_a_negative_clip_is_refused_by_name(name, value) -> None:
    with pytest.raises(ValueError, match=name):
        policy_loss_of_token(1.0, 1.0, **{**CLIPS, name: value})


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "clipped"),
    [
        # Within the range: plain 0.5 (0.1 - 1)^2.
        (0.1, 0.0, 1.0, 0.405, -0.9, 0.0),
        # Moved 0.5 towards the target, cut to 0.2: 0.5 (0.2 - 1)^2, no further gradient.
        (0.5, 0.0, 1.0, 0.32, 0.0, 1.0),
        # Moved away from the target: the plain error is the larger.
        (-0.5, 0.0, 1.0, 1.125, -1.5, 0.0),
    ],
)
def test_value_loss_of_one_token(value, old, target, loss, gradient, clipped) -> None:
    values = torch.tensor([[value]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    result = value_loss(
        values, torch.tensor([[old]]), torch.tensor([[target]]), mask, clip_range=0.2
    )
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(loss, rel=1e-6)
    assert values.grad.item() == pytest.approx(gradient, rel=1e-6)
    assert mean_of(result.metrics["vf_clipfrac"]) == clipped
    assert mean_of(result.metrics["vpred_mean"]) == pytest.approx(value)


def test_value_loss_without_a_range_is_half_the_squared_error() -> None:
    values = torch.tensor([[3.0, 7.0]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    result = value_loss(
        values, torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]), mask, clip_range=None
    )
    result.loss.sum().backward()
    assert result.loss.tolist() == [[2.0, 0.0]]
    assert values.grad.tolist() == [[2.0, 0.0]]
    assert mean_of(result.metrics["vf_clipfrac"]) == 0.0


@settings(deadline=None)
@given(*[st.floats(-5, 5, width=32)] * 3, st.floats(0.01, 3))
def test_value_loss_matches_python(value, old, target, clip_range) -> None:
    near = min(max(value, old - clip_range), old + clip_range)
    expected = 0.5 * max((value - target) ** 2, (near - target) ** 2)
    result = value_loss(
        *(torch.tensor([[x]]) for x in (value, old, target)),
        torch.ones(1, 1, dtype=torch.bool),
        clip_range=clip_range,
    )
    assert result.loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_value_loss_of_large_errors_is_finite() -> None:
    values = torch.tensor([[1e15]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss = value_loss(
        values, torch.zeros(1, 1), torch.full((1, 1), -1e15), mask, clip_range=0.2
    ).loss
    loss.sum().backward()
    assert loss.isfinite().all()
    assert values.grad.isfinite().all()


def test_a_nan_on_a_trained_token_stays_visible_in_the_value_loss() -> None:
    values = torch.tensor([[0.0, math.nan]])
    zeros, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    loss = value_loss(values, zeros, zeros, mask, clip_range=0.2).loss
    assert loss.isnan().tolist() == [[False, True]]


@pytest.mark.parametrize("clip_range", [0.0, -0.5, math.nan])
def test_a_value_clip_range_that_is_not_positive_is_refused(clip_range) -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="clip_range must be > 0, got"):
        value_loss(one, one, one, one.bool(), clip_range=clip_range)


def test_minimising_the_entropy_loss_raises_the_entropy() -> None:
    logits = torch.tensor([[[1.0, -1.0]]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)

    def entropy() -> torch.Tensor:
        log_p = logits.log_softmax(-1)
        return -(log_p.exp() * log_p).sum(-1)

    before = entropy()
    result = entropy_loss(before, mask)
    result.loss.sum().backward()
    assert mean_of(result.metrics["entropy"]) == before.item() == -result.loss.item()
    logits.data -= 0.1 * logits.grad
    assert entropy().item() > before.item()


def test_a_kl_loss_adds_its_weight_times_its_value() -> None:
    # A policy loss of 0 and k1 = 0.1 on one token, coefficient 0.5.
    log_probs, ref = torch.tensor([[-1.0]]), torch.tensor([[-1.1]])
    mask = torch.ones(1, 1, dtype=torch.bool)
    policy = policy_loss(log_probs, log_probs, torch.zeros(1, 1), mask, **CLIPS)
    kl = kl_loss(log_probs, ref, mask, kind="k1")
    assert (policy.loss + 0.5 * kl.loss).item() == pytest.approx(0.05, rel=1e-6)
    assert mean_of(kl.metrics["kl_loss"]) == pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize("kind", ["k2", "k3", "k3+"])
def test_minimising_the_kl_loss_lowers_the_kl(kind) -> None:
    logits = torch.tensor([0.7, 0.3]).log().requires_grad_()
    reference = torch.tensor([0.5, 0.5]).log()
    # Rows are the two tokens, weighed by their probability: the exact expectation.
    log_p = logits.log_softmax(0)
    loss = kl_loss(
        log_p[:, None], reference[:, None], torch.ones(2, 1, dtype=torch.bool), kind=kind
    )
    (log_p.exp().detach()[:, None] * loss.loss).sum().backward()

    def exact_kl(z: torch.Tensor) -> float:
        p = z.softmax(0)
        return (p * (p.log() - reference)).sum().item()

    assert exact_kl(logits.detach() - 0.1 * logits.grad) < exact_kl(logits.detach()) - 1e-3


def aggregate(loss: torch.Tensor, mask: torch.Tensor, mode: str, parts) -> torch.Tensor:
    """The loss of a mini-batch whose rows are split into `parts`, divided once."""
    numerator = sum((loss[p] * aggregation_weights(mask[p], mode)).sum() for p in parts)
    return numerator / sum(local_denominator(mask[p], mode) for p in parts).clamp(min=1.0)


def test_token_mean_divides_by_all_tokens_of_the_mini_batch() -> None:
    # One micro-batch of four tokens of loss 1, another of one token of loss 5: 9 / 5.
    loss = torch.tensor([[1.0, 1.0, 1.0, 1.0], [5.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[True] * 4, [True, False, False, False]])
    assert aggregate(loss, mask, "token-mean", [[0], [1]]).item() == pytest.approx(1.8)


@pytest.mark.parametrize(
    ("mode", "weights", "denominator"),
    [
        ("token-mean", [[1, 1, 0], [0, 1, 0], [0, 0, 0]], 3),
        ("seq-mean-token-sum", [[1, 1, 0], [0, 1, 0], [0, 0, 0]], 2),
        ("seq-mean-token-mean", [[0.5, 0.5, 0], [0, 1, 0], [0, 0, 0]], 2),
    ],
)
def test_weights_and_denominator_of_each_mode(mode, weights, denominator) -> None:
    mask = torch.tensor([[True, True, False], [False, True, False], [False, False, False]])
    assert aggregation_weights(mask, mode).tolist() == weights
    assert local_denominator(mask, mode).item() == denominator


def aggregate_by_loops(loss, mask, mode: str) -> float:
    """Each mode as its name says, over Python lists."""
    rows = [[x for x, m in zip(*row, strict=True) if m] for row in zip(loss, mask, strict=True)]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if mode == "token-mean":
        return math.fsum(x for row in rows for x in row) / sum(len(row) for row in rows)
    per_row = [math.fsum(row) / (len(row) if mode == "seq-mean-token-mean" else 1) for row in rows]
    return math.fsum(per_row) / len(rows)


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.floats(-2, 2, width=32), st.booleans()), min_size=5, max_size=5),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 6),
    st.sampled_from(LOSS_AGG_MODES),
)
def test_aggregation_is_the_same_for_every_split_and_its_gradient_too(
    rows, num_parts, mode
) -> None:
    mask = torch.tensor([[m for _, m in row] for row in rows])
    numbers = [[x for x, _ in row] for row in rows]
    loss = torch.where(mask, torch.tensor(numbers), torch.zeros(())).requires_grad_()
    parts = [list(range(r, len(rows), num_parts)) for r in range(num_parts)]
    split = aggregate(loss, mask, mode, parts)
    (split_gradient,) = torch.autograd.grad(split, loss)
    whole = aggregate(loss, mask, mode, [list(range(len(rows)))])
    (whole_gradient,) = torch.autograd.grad(whole, loss)
    assert split.item() == pytest.approx(
        aggregate_by_loops(numbers, mask.tolist(), mode), rel=1e-5, abs=1e-6
    )
    assert torch.equal(split_gradient, whole_gradient)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_an_empty_mini_batch_has_denominator_zero_and_zero_weights(mode) -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool)
    assert local_denominator(mask, mode).item() == 0.0
    assert torch.equal(aggregation_weights(mask, mode), torch.zeros(2, 3))


@pytest.mark.parametrize("function", [aggregation_weights, local_denominator])
def test_an_unknown_aggregation_mode_lists_the_known_ones(function) -> None:
    known = "known: seq-mean-token-mean, seq-mean-token-sum, token-mean"
    with pytest.raises(ValueError, match=known):
        function(torch.ones(1, 1, dtype=torch.bool), "mean")
