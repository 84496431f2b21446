"""What each `algorithm.adv_estimator` needs, so that a config is judged before anything is built.

How an estimator computes stands in `trainer/advantage_methods.py`, under the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EstimatorTraits:
    """Demands of one estimator."""

    uses_critic: bool = False
    """A value model is built and trained."""
    compares_siblings: bool = False
    """The baseline is made of the other responses to the prompt: needs `rollout.n` over 1."""
    uses_greedy_baseline: bool = False
    """Each prompt is also answered greedily, and that answer scored."""
    whitens: bool = False
    """Advantages are whitened unless the config says otherwise."""
    may_whiten: bool = False
    discounts: bool = False
    """`gamma` has a meaning."""


ESTIMATORS: Mapping[str, EstimatorTraits] = {
    "gae": EstimatorTraits(uses_critic=True, whitens=True, may_whiten=True, discounts=True),
    "grpo": EstimatorTraits(compares_siblings=True),
    "dr_grpo": EstimatorTraits(compares_siblings=True),
    "rloo": EstimatorTraits(compares_siblings=True),
    "reinforce_pp": EstimatorTraits(whitens=True, may_whiten=True, discounts=True),
    "reinforce_pp_baseline": EstimatorTraits(compares_siblings=True, whitens=True, may_whiten=True),
    "remax": EstimatorTraits(uses_greedy_baseline=True),
}
