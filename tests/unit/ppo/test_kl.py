import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.ppo.kl import AdaptiveKLController, FixedKLController, kl_penalty, sequence_kl

KINDS = ["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl"]
ALL_KINDS = KINDS + [f"{kind}+" for kind in KINDS]


def value_and_gradient(log_prob: float, ref: float, kind: str) -> tuple[float, float]:
    x = torch.tensor([[log_prob]], requires_grad=True)
    kl = kl_penalty(x, torch.tensor([[ref]]), kind)
    kl.sum().backward()
    return kl.item(), x.grad.item()


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        # r = log q - log p = -ln 2: exp(r) - r - 1 = 0.5 + 0.6931472 - 1; gradient 1 - 0.5.
        ("k1", 0.6931472, 1.0),
        ("kl", 0.6931472, 1.0),
        ("abs", 0.6931472, 1.0),
        ("k2", 0.2402265, 0.6931472),
        ("mse", 0.2402265, 0.6931472),
        ("k3", 0.1931472, 0.5),
        ("low_var_kl", 0.1931472, 0.5),
        ("k1+", 0.6931472, 0.6931472),
        ("abs+", 0.6931472, 0.6931472),
        ("k2+", 0.2402265, 0.6931472),
        ("k3+", 0.1931472, 0.6931472),
        ("low_var_kl+", 0.1931472, 0.6931472),
    ],
)
def test_kl_of_a_token_twice_as_likely_as_under_the_reference(kind, value, gradient) -> None:
    got = value_and_gradient(math.log(0.5), math.log(0.25), kind)
    assert got == pytest.approx((value, gradient), rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "gradient"),
    [("k1", 0.0), ("k2", 0.177933), ("k3", 0.2), ("k3+", 0.177933), ("k1+", 0.177933)],
)
def test_expected_gradient_of_each_kind_over_both_tokens(kind, gradient) -> None:
    # p = (0.7, 0.3), q = (0.5, 0.5): the true d KL(p||q) / d z_0 is 0.177933, that of KL(q||p) 0.2.
    logits = torch.tensor([0.7, 0.3]).log().requires_grad_()
    log_p = logits.log_softmax(0)
    kl = kl_penalty(log_p, torch.tensor([0.5, 0.5]).log(), kind)
    (log_p.exp().detach() * kl).sum().backward()
    assert logits.grad[0].item() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_expected_gradient_of_each_kind_over_five_tokens(kind) -> None:
    """Against autograd of the exact KL, of the KL the other way round, or of what k1 and abs do."""
    p = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.05], dtype=torch.float64)
    q = torch.tensor([0.1, 0.3, 0.25, 0.05, 0.3], dtype=torch.float64)

    def gradient(objective):
        logits = p.log().requires_grad_()
        objective(logits.log_softmax(0)).backward()
        return logits.grad

    found = gradient(lambda log_p: (p * kl_penalty(log_p, q.log(), kind)).sum())
    if kind.endswith("+") or kind in ("k2", "mse"):
        expected = gradient(lambda log_p: (log_p.exp() * (log_p - q.log())).sum())
    elif kind in ("k3", "low_var_kl"):
        expected = gradient(lambda log_p: (q * (q.log() - log_p)).sum())
    elif kind == "abs":
        expected = gradient(lambda log_p: (p * (p / q).log().sign() * log_p).sum())
    else:
        expected = torch.zeros(5)
    assert (found - expected).abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["k1", "k3", "k3+"])
def test_expected_value_of_an_unbiased_kind_is_the_kl(kind) -> None:
    p = torch.tensor([0.7, 0.3])
    kl = (p * kl_penalty(p.log(), torch.tensor([0.5, 0.5]).log(), kind)).sum()
    assert kl.item() == pytest.approx(0.082283, abs=1e-6)


@settings(deadline=None)
@given(st.floats(-15, 0, width=32), st.floats(-15, 0, width=32))
def test_k3_matches_float64(log_prob, ref) -> None:
    value, gradient = value_and_gradient(log_prob, ref, "k3")
    r = ref - log_prob
    # Two units in the last place of each term, r's own rounding carried through e^r.
    value_error = 2.0**-22 * ((1 + abs(r)) * abs(math.expm1(r)) + abs(r))
    gradient_error = 2.0**-22 * ((1 + abs(r)) * math.exp(r) + 1)
    assert value == pytest.approx(math.expm1(r) - r, rel=0, abs=value_error)
    assert gradient == pytest.approx(-math.expm1(r), rel=0, abs=gradient_error)


def test_k3_keeps_its_value_for_a_tiny_log_ratio() -> None:
    # r = 2^-13: exp(r) - r - 1 is r^2 / 2 = 2^-27, below the rounding of 1 + r in float32.
    value, _ = value_and_gradient(-1.0, -1.0 + 2.0**-13, "k3")
    assert value == pytest.approx(2.0**-27, rel=1e-3)


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize(
    ("log_prob", "ref"), [(-120.0, -1.0), (-1.0, -120.0), (-1e6, 0.0), (0.0, -1e6)]
)
def test_kl_of_far_log_probs_is_finite_in_value_and_gradient(kind, log_prob, ref) -> None:
    value, gradient = value_and_gradient(log_prob, ref, kind)
    assert math.isfinite(value)
    assert math.isfinite(gradient)


def test_k3_of_far_log_probs_is_clamped_at_twenty_nats_and_not_at_ten() -> None:
    assert value_and_gradient(-120.0, -1.0, "k3")[0] == pytest.approx(math.exp(20) - 21, rel=1e-6)
    assert value_and_gradient(-6.0, -1.0, "k3")[0] == pytest.approx(math.exp(5) - 6, rel=1e-6)


def test_straight_through_kinds_pull_back_from_far_away() -> None:
    assert value_and_gradient(-120.0, -1.0, "k3+")[1] == -119.0


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize(("log_prob", "ref"), [(math.nan, -1.0), (-1.0, math.nan)])
def test_a_nan_log_prob_stays_nan(kind, log_prob, ref) -> None:
    assert math.isnan(value_and_gradient(log_prob, ref, kind)[0])


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_kl_of_equal_policies_is_zero(kind) -> None:
    assert value_and_gradient(-3.5, -3.5, kind)[0] == 0.0


def test_kl_is_computed_in_float32_from_half_precision() -> None:
    kl = kl_penalty(torch.tensor([-1.0]).bfloat16(), torch.tensor([-1.0078125]).bfloat16(), "k2")
    assert kl.dtype is torch.float32
    assert kl.item() == 0.5 * 0.0078125**2


@pytest.mark.parametrize("kind", ["k4", "k3++", "", "+"])
def test_an_unknown_kl_kind_lists_the_known_ones(kind) -> None:
    known = "known: abs, k1, k2, k3, kl, low_var_kl, mse"
    with pytest.raises(ValueError, match=known):
        kl_penalty(torch.zeros(1), torch.zeros(1), kind)


def test_sequence_kl_does_not_count_a_fully_masked_rollout() -> None:
    kl = torch.tensor([[0.3, math.nan], [math.nan, 5.0]])
    total, count = sequence_kl(kl, torch.tensor([[True, False], [False, False]]))
    assert (total / count).item() == pytest.approx(0.3)


def test_sequence_kl_averages_within_a_sample_before_summing() -> None:
    kl = torch.tensor([[1.0, 3.0, 8.0], [4.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    total, count = sequence_kl(kl, mask)
    assert (total.item(), count.item()) == (6.0, 2.0)


@pytest.mark.parametrize(("mean_kl", "coef"), [(12.0, 0.201024), (6.0, 0.2), (3.0, 0.198976)])
def test_adaptive_coefficient_moves_towards_the_target(mean_kl, coef) -> None:
    controller = AdaptiveKLController(0.2, 6.0, 10000)
    controller.update(mean_kl, 256)
    assert controller.kl_coef == pytest.approx(coef, rel=1e-12)


def test_adaptive_coefficient_is_proportional_within_the_clip() -> None:
    # 6.6 / 6 - 1 = 0.1; 0.2 * (1 + 0.1 * 0.5)
    controller = AdaptiveKLController(0.2, 6.0, 100)
    controller.update(6.6, 50)
    assert controller.kl_coef == pytest.approx(0.21, rel=1e-12)


def test_adaptive_coefficient_survives_a_checkpoint() -> None:
    first = AdaptiveKLController(0.2, 6.0, 10000)
    first.update(12.0, 256)
    second = AdaptiveKLController(0.5, 6.0, 10000)
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(3.0, 256)
    assert first.kl_coef == second.kl_coef


@settings(deadline=None)
@given(st.lists(st.floats(-10, 1e6), max_size=50))
def test_adaptive_coefficient_stays_positive(measured) -> None:
    controller = AdaptiveKLController(0.2, 0.1, 1000)
    for mean_kl in measured:
        controller.update(mean_kl, 512)
        assert controller.kl_coef > 0.0


@pytest.mark.parametrize("mean_kl", [math.nan, math.inf])
def test_adaptive_controller_refuses_a_kl_that_is_not_finite(mean_kl) -> None:
    controller = AdaptiveKLController(0.2, 6.0, 10000)
    with pytest.raises(ValueError, match=r"mean_kl must be finite, got (nan|inf)"):
        controller.update(mean_kl, 256)
    assert controller.kl_coef == 0.2


def test_adaptive_controller_refuses_a_horizon_below_the_samples_of_a_step() -> None:
    with pytest.raises(ValueError, match="got 500; raise the horizon, now 100"):
        AdaptiveKLController(0.2, 6.0, 100).update(3.0, 500)


@pytest.mark.parametrize("arguments", [(0.0, 6.0, 10.0), (0.2, 0.0, 10.0), (0.2, 6.0, -1.0)])
def test_adaptive_controller_refuses_settings_that_are_not_positive(arguments) -> None:
    with pytest.raises(ValueError, match=r"(kl_coef|target_kl|horizon) must be finite and > 0"):
        AdaptiveKLController(*arguments)


def test_adaptive_controller_refuses_the_state_of_a_fixed_one() -> None:
    with pytest.raises(ValueError, match="holds no adaptive kl_coef"):
        AdaptiveKLController(0.2, 6.0, 10.0).load_state_dict(FixedKLController(0.1).state_dict())


def test_fixed_coefficient_never_moves() -> None:
    controller = FixedKLController(0.1)
    controller.update(100.0, 256)
    controller.load_state_dict({"kl_coef": 0.7})
    assert controller.kl_coef == 0.1


def test_fixed_controller_refuses_a_negative_coefficient() -> None:
    with pytest.raises(ValueError, match=r"kl_coef must be finite and >= 0, got -0\.1"):
        FixedKLController(-0.1)
