"""Conditions under which going on would train on wrong numbers.

Decided from reduced metrics, so that every rank decides the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megappo.config.sections import GuardSection
from megappo.errors import GuardStop


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Stops a run whose engine and trainer disagree on what was sampled."""

    settings: GuardSection
    comparable: bool
    """False where the engine's log-probs are of a truncated distribution (top_p, top_k)."""

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Looks at a step's rollout metrics, before its update.

        Raises:
            GuardStop: the mean difference is over `guard.max_log_prob_diff`.
        """
        limit = self.settings.max_log_prob_diff
        found = metrics["rollout/log_prob_diff_mean"]
        if limit and self.comparable and not found <= limit:
            raise GuardStop(
                f"step {step}: engine and trainer log-probs differ by {found:.3g} nats a token on "
                f"average, over guard.max_log_prob_diff ({limit}): the engine does not hold the "
                "actor's weights, or samples by other settings"
            )
