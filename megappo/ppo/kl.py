"""Per-token KL estimates between policy and reference, and the coefficient that weighs them.

Legend: B samples, T response tokens; nats. With tokens sampled from the policy p and a reference
q, each kind estimates KL(p || q) from `r = log q - log p`, after Schulman's note "Approximating
KL Divergence" (2020).

Which kind for what: in the *reward* k1 has the gradient of KL(p || q). k3 has its value there too,
with less variance, but a policy gradient lacks what the estimate itself changes by, which is k3's
gradient as a loss. As a *loss* k1's gradient has mean zero and k3's is that of the forward
KL(q || p); k2 has the gradient of KL(p || q). `k3+` has k3's value and k2's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from megappo.ppo.masking import masked_count, zero_outside

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 nats before exp: e^20 = 4.9e8 is far past any use, and exp
overflows float32 above 88.7. A clamp after exp instead would leave the value finite, but make
the gradient 0 * inf, which is NaN."""

MAX_RELATIVE_STEP = 0.2
"""Ziegler 2019, section 2.2: the clip of the controller's proportional error."""


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """KL(policy || reference) of each token, estimated from the sampled token alone.

    With `r = ref_log_probs - log_probs`: `k1` (= `kl`) is -r; `abs` is |r|; `k2` (= `mse`) is
    r^2/2; `k3` (= `low_var_kl`) is exp(r) - r - 1. A trailing `+` keeps the value and takes k2's
    gradient.

    Only k3 clamps r, to +-20; past that its gradient is 0. Deviation: verl also clamps k3's result
    to +-10, and so has no gradient from r = 2.6 on; here the result is not clamped.

    Args:
        log_probs: [B, T], of the sampled tokens by the policy.
        ref_log_probs: [B, T], of the same tokens by the reference.
        kind: a kind's name, with or without `+`.

    Returns:
        [B, T] float32, nats. Finite for |r| up to 1e19 (k2 squares it); NaN inputs stay NaN.
        Masked slots hold whatever their inputs gave: clean those with `masking.zero_outside`
        first, as `losses.kl_loss` does.

    Raises:
        ValueError: if `kind` is unknown.
    """
    base = kind.removesuffix("+")
    if base not in _ESTIMATORS:
        known = ", ".join(sorted(_ESTIMATORS))
        raise ValueError(
            f"unknown KL kind {kind!r}; known: {known}; "
            "each also with a trailing '+' for its value with k2's gradient"
        )
    excess = log_probs.float() - ref_log_probs.float()
    value = _ESTIMATORS[base](excess)
    if not kind.endswith("+"):
        return value
    # k2's gradient is `excess` itself; a term of value 0 carries it. Subtracting k2 from itself
    # would do the same until r^2 overflows.
    return value.detach() + excess.detach() * (excess - excess.detach())


def _k1(excess: Tensor) -> Tensor:
    return excess


def _k2(excess: Tensor) -> Tensor:
    return 0.5 * excess.square()


def _k3(excess: Tensor) -> Tensor:
    r = (-excess).clamp(min=-MAX_LOG_RATIO, max=MAX_LOG_RATIO)
    # expm1, not exp: near r = 0 the value is r^2/2, which exp(r) - 1 would lose to rounding.
    return torch.expm1(r) - r


_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
    "kl": _k1,
    "low_var_kl": _k3,
    "mse": _k2,
}


def sequence_kl(kl: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """What a KL controller is fed, as a sum and a count: the mean of `kl` within each sample.

    A sample without a trained token is not counted: it has no KL, rather than a KL of 0. The mean
    within a sample is verl's unit for `target_kl`. Deviation: Ziegler 2019 sums within a sample,
    so a target from that paper is to be divided by the response length.

    Args:
        kl: [B, T], nats.
        response_mask: [B, T] bool, whole samples.

    Returns:
        `(sum, count)`, 0-dim float32: of the samples' means, and of samples with a trained token.
        Reduce both over data parallel ranks before dividing.
    """
    length = response_mask.sum(dim=-1)
    mean = zero_outside(kl, response_mask).sum(dim=-1) / length.clamp(min=1)
    return mean.sum(), masked_count(length > 0)


class KLController(Protocol):
    """Holds the weight of KL in the reward and may change it once a step."""

    @property
    def kl_coef(self) -> float:
        """The weight of the next step."""
        ...

    def update(self, mean_kl: float, num_samples: int) -> None:
        """Takes in the step's measured KL.

        Args:
            mean_kl: nats, over all ranks (`sequence_kl`), so that every rank ends with the same
                weight.
            num_samples: samples of the step, over all ranks.
        """
        ...

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must hold."""
        ...

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes up the state of a checkpoint."""
        ...


class FixedKLController:
    """Keeps the configured weight. It has no state: on a resume the configuration speaks."""

    def __init__(self, kl_coef: float) -> None:
        _require("kl_coef", kl_coef, kl_coef >= 0.0, ">= 0")
        self._kl_coef = kl_coef

    @property
    def kl_coef(self) -> float:
        """The configured weight."""
        return self._kl_coef

    def update(self, mean_kl: float, num_samples: int) -> None:
        """Leaves the weight as it is."""

    def state_dict(self) -> dict[str, float]:
        """Empty."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Leaves the weight as configured, also when an adaptive run saved `state`."""


class AdaptiveKLController:
    """Moves the weight so that the measured KL nears a target.

    Ziegler 2019 (arXiv 1909.08593), section 2.2, with n samples a step:
    `kl_coef *= 1 + clip(mean_kl / target_kl - 1, -0.2, 0.2) * n / horizon`. The paper has 0.1 in
    the place of n / horizon; its published code, and verl, have this.
    """

    def __init__(self, kl_coef: float, target_kl: float, horizon: float) -> None:
        """Starts at `kl_coef`.

        Args:
            kl_coef: first weight, > 0: the update multiplies, so 0 would stay 0.
            target_kl: nats, in the unit of `sequence_kl`.
            horizon: samples over which an error of 20 % or more moves the weight by about 20 %.

        Raises:
            ValueError: if one of them is not positive and finite.
        """
        for name, value in (("kl_coef", kl_coef), ("target_kl", target_kl), ("horizon", horizon)):
            _require(name, value, value > 0.0, "> 0 for an adaptive KL coefficient")
        self._kl_coef = kl_coef
        self._target_kl = target_kl
        self._horizon = horizon

    @property
    def kl_coef(self) -> float:
        """The weight of the next step."""
        return self._kl_coef

    def update(self, mean_kl: float, num_samples: int) -> None:
        """Moves the weight by one step's measurement.

        Args:
            mean_kl: nats, over all ranks.
            num_samples: samples of the step, over all ranks; fewer than 5 `horizon`, or the weight
                could reach 0.

        Raises:
            ValueError: if `mean_kl` is not finite, which a clip would hide, or `num_samples` is
                too large.
        """
        if not math.isfinite(mean_kl):
            raise ValueError(
                f"mean_kl must be finite, got {mean_kl}; look for NaN in the log-probs of the step"
            )
        limit = self._horizon / MAX_RELATIVE_STEP
        if not 0 <= num_samples < limit:
            raise ValueError(
                f"num_samples must be in [0, horizon / 0.2) = [0, {limit:g}), got {num_samples}; "
                f"raise the horizon, now {self._horizon:g}, above the samples of a step"
            )
        error = mean_kl / self._target_kl - 1.0
        error = min(max(error, -MAX_RELATIVE_STEP), MAX_RELATIVE_STEP)
        self._kl_coef *= 1.0 + error * num_samples / self._horizon

    def state_dict(self) -> dict[str, float]:
        """The present weight; target and horizon are configuration."""
        return {"kl_coef": self._kl_coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes up the saved weight.

        Raises:
            ValueError: if the checkpoint holds none, as one of a run with a fixed coefficient.
        """
        if "kl_coef" not in state:
            raise ValueError(
                "the checkpoint holds no adaptive kl_coef (its keys: "
                f"{', '.join(sorted(state)) or 'none'}); resume with a fixed KL coefficient"
            )
        _require("kl_coef", state["kl_coef"], state["kl_coef"] > 0.0, "> 0 in a checkpoint")
        self._kl_coef = float(state["kl_coef"])


def _require(name: str, value: float, holds: bool, rule: str) -> None:
    if not (math.isfinite(value) and holds):
        raise ValueError(f"{name} must be finite and {rule}, got {value}")
