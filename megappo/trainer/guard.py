"""Rules that watch a run's numbers and say what is to be done; `response.py` does it.

Every number is reduced over ranks before it comes here, so that every rank decides the same. A rule
judges a gradient norm or loss at each optimizer step, before it writes weights; any other metric at
the end of a step. Left out: rules over several metrics at once, and over trends.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from megappo.config.guard import OUT_OF_MEMORY, UPDATE_METRICS, Action, GuardRule, GuardSection
from megappo.errors import GuardStop

ABANDONING: tuple[Action, ...] = ("roll_back", "save_and_stop")
"""Actions that end a step in its middle when an update asks for them."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What one rule wants, and why."""

    rule: str
    action: Action
    reason: str
    step: int
    spec: GuardRule
    detail: str = ""
    """what else is known, in words"""


class StepAbandoned(RuntimeError):  # noqa: N818, an outcome and not a mistake
    """A guard ended a step before its updates were done. Raised on all ranks alike."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision.reason)
        self.decision = decision


@dataclass(kw_only=True)
class Guard:
    """The rules of a run, with how often each held in a row. Nothing here communicates."""

    settings: GuardSection
    comparable: bool
    """False where the engine may report log-probs of kept tokens alone (top_p, top_k, min_p)."""
    num_actions: int = 0
    """Actions but warnings, in the run's life."""
    streaks: dict[str, int] = field(default_factory=dict)
    """`rule:metric` -> times in a row that the condition held."""
    decided: list[Decision] = field(default_factory=list)
    """At updates of the running step, not carried out yet."""
    _told: dict[str, float] = field(default_factory=dict, init=False)
    """`rule:metric` -> worst value that was warned of since the condition began to hold. A new
    start warns anew, so it is no part of a checkpoint."""

    def warnings(self, metrics: Mapping[str, float]) -> list[str]:
        """What a step's metrics give reason to look at; the run goes on."""
        return [*self._gap_warning(metrics), *_empty_warning(metrics)]

    def _gap_warning(self, metrics: Mapping[str, float]) -> list[str]:
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

    def admit(self, step: int, figures: Mapping[str, float], *, detail: str = "") -> bool:
        """Whether an optimizer step may write weights.

        Args:
            step: the running one.
            figures: gradient norm and loss of the update, names of `UPDATE_METRICS`.
            detail: what else is known, for the event.

        Raises:
            StepAbandoned: a rule wants to go back, or to stop.
        """
        found = self._judge(step, figures, detail=detail)
        self.decided += [d for d in found if d.action not in ABANDONING]
        for decision in found:
            if decision.action in ABANDONING:
                raise StepAbandoned(decision)
        return not any(decision.action == "skip_update" for decision in found)

    def after_step(self, step: int, metrics: Mapping[str, float]) -> list[Decision]:
        """What is to be done after a step, its updates' decisions included."""
        at_end = {k: v for k, v in metrics.items() if k not in UPDATE_METRICS}
        return self.take_decided() + self._judge(step, at_end)

    def take_decided(self) -> list[Decision]:
        """What updates of the running step have asked for, once."""
        taken, self.decided = self.decided, []
        return taken

    def out_of_memory(self, step: int, text: str) -> Decision | None:
        """The rule for a rank without device memory, if it is not switched off."""
        return next(iter(self._judge(step, {OUT_OF_MEMORY: 1.0}, detail=text)), None)

    def unknown_metrics(
        self, metrics: Mapping[str, float], *, of_updates: Collection[str]
    ) -> list[str]:
        """Rules that can never hold because a step has no such metric, as sentences.

        Args:
            metrics: of the first step.
            of_updates: those that the task's updates have, applied in that step or not.
        """
        known = {*metrics, *of_updates, OUT_OF_MEMORY, "perf/max_memory_share"}
        return [
            f"guard.rules.{name} watches {metric}, which the first step does not have"
            for name, rule in self.settings.rules.items()
            for metric in rule.metrics
            if rule.action != "none" and metric not in known and not metric.startswith("val/")
        ]

    @property
    def in_doubt(self) -> bool:
        """Whether a rule that would go back has begun to hold: no state to keep.

        What is not finite was never written, so it leaves the state as good as it was.
        """
        return any(
            count > 0 and self._goes_back_from(*_rule_and_metric(key))
            for key, count in self.streaks.items()
        )

    def _goes_back_from(self, name: str, metric: str) -> bool:
        rule = self.settings.rules[name]
        written = not rule.non_finite or metric not in UPDATE_METRICS
        return rule.action == "roll_back" and written

    def forget_streaks(self) -> None:
        """After a return to an earlier state, what came later no longer counts."""
        self.streaks = {}
        self._told = {}

    def state_dict(self) -> dict[str, Any]:
        """JSON values for a checkpoint."""
        return {"num_actions": self.num_actions, "streaks": dict(self.streaks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up the counts of a checkpoint."""
        self.num_actions = int(state["num_actions"])
        self.streaks = {
            str(k): int(v)
            for k, v in state["streaks"].items()
            if self._is_watched(*_rule_and_metric(k))
        }

    def _is_watched(self, name: str, metric: str) -> bool:
        rule = self.settings.rules.get(name)
        return rule is not None and metric in rule.metrics

    def _judge(
        self, step: int, figures: Mapping[str, float], *, detail: str = ""
    ) -> list[Decision]:
        found = []
        for name, rule in self.settings.rules.items():
            if rule.action == "none":
                continue
            seen = {metric: figures[metric] for metric in rule.metrics if metric in figures}
            held = [m for m in seen if self._has_held(f"{name}:{m}", rule, seen[m])]
            if rule.action == "warn":
                held = [m for m in seen if self._is_news(f"{name}:{m}", rule, seen[m], m in held)]
            if held:
                times = f" for {rule.for_steps} steps" if rule.for_steps > 1 else ""
                values = " and ".join(f"{metric} was {seen[metric]:.4g}" for metric in held)
                found.append(
                    Decision(
                        rule=name,
                        action=rule.action,
                        reason=f"{values}, {rule.condition}{times} (guard.rules.{name})",
                        step=step,
                        spec=rule,
                        detail=detail,
                    )
                )
        return found

    def _has_held(self, key: str, rule: GuardRule, value: float) -> bool:
        """Whether the condition has now held for as long as the rule asks; it then starts anew."""
        self.streaks[key] = self.streaks.get(key, 0) + 1 if holds(rule, value) else 0
        if self.streaks[key] < rule.for_steps:
            return False
        self.streaks[key] = 0
        return True

    def _is_news(self, key: str, rule: GuardRule, value: float, has_held: bool) -> bool:
        """Whether to warn: the condition held for the first time, or is now further exceeded.

        A peak since the start of a run never falls, and is worth one line a rise.
        """
        if not holds(rule, value):
            self._told.pop(key, None)
            return False
        told = self._told.get(key)
        if not has_held or (told is not None and not _is_worse(rule, value, told)):
            return False
        self._told[key] = value
        return True


def _empty_warning(metrics: Mapping[str, float]) -> list[str]:
    empty = metrics["training/empty_updates"]
    if not empty:
        return []
    return [
        f"{empty:.0f} updates were skipped: no response of their mini-batches had a trained token, "
        f"and {metrics['response_length/clip_ratio']:.0%} of the step's were cut at their limit; "
        "where algorithm.mask_truncated leaves those out, raise rollout.max_response_length"
    ]


def _rule_and_metric(key: str) -> tuple[str, str]:
    """The parts of a key of `Guard.streaks`; no metric has a colon in its name."""
    name, _, metric = key.rpartition(":")
    return name, metric


def _is_worse(rule: GuardRule, value: float, than: float) -> bool:
    """Whether a value is further beyond the rule's limit; what is not finite is never worse."""
    return value > than if rule.above is not None else rule.below is not None and value < than


def holds(rule: GuardRule, value: float) -> bool:
    """Whether a rule's condition is met."""
    if rule.non_finite or not math.isfinite(value):
        return rule.non_finite and not math.isfinite(value)
    if rule.above is not None:
        return value > rule.above
    return rule.below is not None and value < rule.below
