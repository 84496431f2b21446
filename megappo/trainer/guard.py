"""Conditions under which going on would train on wrong numbers, or deserves a look.

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

    def warnings(self, metrics: Mapping[str, float]) -> list[str]:
        """What a step's metrics give reason to look at; the run goes on."""
        limit = self.settings.warn_log_prob_diff
        found = metrics["rollout/log_prob_diff_mean"]
        if not limit or not self.comparable or found <= limit:
            return []
        return [
            f"engine and trainer log-probs differ by {found:.3g} nats a token on average, over "
            f"guard.warn_log_prob_diff ({limit}); largest "
            f"{metrics['rollout/log_prob_diff_max']:.3g}, effective sample size "
            f"{metrics['rollout/eff_sample_size_token']:.3f} of the tokens, "
            f"{metrics['rollout/eff_sample_size_sequence']:.3f} of the responses"
        ]

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Looks at a step's rollout metrics, before its update.

        Raises:
            GuardStop: the mean difference is over `guard.max_log_prob_diff`, or
                `algorithm.rollout_rs` left nothing to train on.
        """
        limit = self.settings.max_log_prob_diff
        found = metrics["rollout/log_prob_diff_mean"]
        if limit and self.comparable and not found <= limit:
            raise GuardStop(
                f"step {step}: engine and trainer log-probs differ by {found:.3g} nats a token on "
                f"average, over guard.max_log_prob_diff ({limit}): the engine does not hold the "
                "actor's weights, or samples by other settings"
            )
        if metrics.get("rollout/rs_rejected_share") == 1.0:
            raise GuardStop(
                f"step {step}: algorithm.rollout_rs rejected every token (mean difference "
                f"{found:.3g} nats): raise algorithm.rollout_rs_threshold, or take level token"
            )
