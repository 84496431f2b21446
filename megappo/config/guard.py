"""The section of guards: rules that watch a run's numbers, and what they do about them.

A rule reads "when one of `metrics` is above (below, not finite) for `for_steps` steps in a row, do
`action`". Rules have names, so that a default one is changed or switched off by name
(`guard.rules.kl.action=none`) and others are added beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megappo.config.fields import Problems, entries, opt

PPO_UPDATE_METRICS = ("actor/grad_norm", "actor/loss", "critic/grad_norm", "critic/vf_loss")
UPDATE_METRICS_OF = {
    "rm": ("rm/grad_norm", "rm/loss"),
    "sft": ("sft/grad_norm", "sft/loss"),
}
"""Of training on given answers, by task."""

SUPERVISED_UPDATE_METRICS = (*UPDATE_METRICS_OF["rm"], *UPDATE_METRICS_OF["sft"])
"""What default rules watch: those of the other task never come."""

UPDATE_METRICS = (*PPO_UPDATE_METRICS, *SUPERVISED_UPDATE_METRICS)
"""Known of each optimizer step before it writes weights; rules judge each of them there."""

OUT_OF_MEMORY = "out_of_memory"
"""Not a metric: 1 where PyTorch found no device memory for a tensor on some rank."""

Action = Literal[
    "none",
    "warn",
    "skip_update",
    "lower_lr",
    "raise_kl_coef",
    "halve_micro_batch",
    "roll_back",
    "save_and_stop",
]


@dataclass(frozen=True, kw_only=True)
class GuardRule:
    """One condition and what is done when it holds."""

    metrics: list[str] = opt(
        [], "names as in metrics.jsonl, each watched by itself; gradient norms and losses are "
        "judged at each optimizer step, before it writes",
    )  # fmt: skip
    above: float | None = opt(
        None, "holds over this value; metrics that are not finite are left to non_finite"
    )
    below: float | None = opt(None, "holds under this value")
    non_finite: bool = opt(False, "holds where the metric is not a number or infinite")
    for_steps: int = opt(
        1, "so many times in a row: steps, or optimizer steps for gradient norms and losses"
    )
    action: Action = opt("warn", "what is done; none switches the rule off")
    role: Literal["actor", "critic", "both"] = opt("actor", "whose rate lower_lr lowers")
    to: float | None = opt(None, "lower_lr: the learning rate from then on, at most")
    factor: float | None = opt(
        None, "lower_lr: times the present rate; raise_kl_coef: times every KL coefficient"
    )

    @property
    def condition(self) -> str:
        """The condition in words."""
        if self.non_finite:
            return "not finite"
        return f"above {self.above:g}" if self.above is not None else f"below {self.below or 0:g}"

    def __str__(self) -> str:
        """The rule as a sentence."""
        times = f" for {self.for_steps} steps" if self.for_steps > 1 else ""
        amount = f" to {self.to:g}" if self.to is not None else ""
        amount += f" by {self.factor:g}" if self.factor is not None else ""
        return f"when {' or '.join(self.metrics)} is {self.condition}{times}: {self.action}{amount}"

    def __post_init__(self) -> None:
        p = Problems()
        p.require(self.for_steps > 0, "for_steps", self.for_steps, "it must be 1 or more")
        if self.action != "none":
            self._check(p)
        p.done()

    def _check(self, p: Problems) -> None:
        p.require(bool(self.metrics), "metrics", self.metrics, "name at least one metric")
        conditions = (self.above is not None) + (self.below is not None) + self.non_finite
        p.require(
            conditions == 1, "above", self.above,
            f"a rule has one condition of above, below and non_finite, not {conditions}",
        )  # fmt: skip
        allowed = {"lower_lr": ("to", "factor"), "raise_kl_coef": ("factor",)}.get(self.action, ())
        given = [name for name in ("to", "factor") if getattr(self, name) is not None]
        p.require(
            set(given) <= set(allowed) and len(given) == bool(allowed), "action", self.action,
            f"it takes {' or '.join(allowed) or 'neither to nor factor'}, not "
            f"{' and '.join(given) or 'nothing'}",
        )  # fmt: skip
        if self.to is not None:
            p.positive(to=self.to)
        if self.factor is not None and self.action == "lower_lr":
            p.require(0 < self.factor < 1, "factor", self.factor, "lower_lr needs one in (0, 1)")
        if self.factor is not None and self.action == "raise_kl_coef":
            p.require(1 < self.factor < 1e6, "factor", self.factor, "it must be over 1")
        if self.action == "skip_update":
            p.require(
                set(self.metrics) <= set(UPDATE_METRICS), "metrics", self.metrics,
                "skip_update needs what is known before the update writes: "
                f"{', '.join(UPDATE_METRICS)}",
            )  # fmt: skip
        if OUT_OF_MEMORY in self.metrics:
            p.require(
                self.action == "halve_micro_batch" and self.metrics == [OUT_OF_MEMORY],
                "action", self.action,
                f"{OUT_OF_MEMORY} stands alone, and can be answered with halve_micro_batch or none",
            )  # fmt: skip


DEFAULT_RULES: Mapping[str, GuardRule] = {
    "kl": GuardRule(metrics=["actor/ppo_kl"], above=0.2, action="lower_lr", to=1e-6),
    "grad_norm": GuardRule(metrics=["actor/grad_norm"], above=5.0, action="roll_back"),
    "non_finite": GuardRule(
        metrics=list(PPO_UPDATE_METRICS), non_finite=True, action="skip_update"
    ),
    "non_finite_again": GuardRule(
        metrics=list(PPO_UPDATE_METRICS), non_finite=True, for_steps=3, action="roll_back"
    ),
    "out_of_memory": GuardRule(metrics=[OUT_OF_MEMORY], above=0.0, action="halve_micro_batch"),
    "peak_memory": GuardRule(metrics=["perf/max_memory_share"], above=0.9, action="warn"),
}


@dataclass(frozen=True, kw_only=True)
class GuardSection:
    """What is done when a run's numbers look wrong."""

    max_log_prob_diff: float = opt(
        0.5, "largest mean |engine - trainer| log-prob difference of a step, nats; 0 does not check"
    )
    warn_log_prob_diff: float = opt(
        0.1, "mean difference, nats, over which a step is reported on the screen and in "
        "events.jsonl; 0 does not warn",
    )  # fmt: skip
    check_ranks_every: int = opt(
        20,
        "steps between comparisons of the weights of ranks that hold the same ones, bit for bit; a "
        "difference ends the run (exit code 1); 0: never, as always under parallel.fsdp",
    )
    rules: dict[str, GuardRule] = entries(
        GuardRule, DEFAULT_RULES, "rules by name; a default one keeps what is not set anew"
    )
    max_actions: int = opt(
        10, "actions other than warn in a run's life; the next one saves and stops it (exit code 3)"
    )
    snapshot_every: int = opt(
        10,
        "steps between copies of weights, optimizers and streams in host memory, for roll_back; 0, "
        "or too little memory: it goes back to checkpoints/latest",
    )

    def __post_init__(self) -> None:
        p = Problems()
        p.not_negative(
            max_log_prob_diff=self.max_log_prob_diff,
            warn_log_prob_diff=self.warn_log_prob_diff,
            check_ranks_every=self.check_ranks_every,
            max_actions=self.max_actions,
            snapshot_every=self.snapshot_every,
        )
        p.done()


@dataclass(frozen=True, kw_only=True)
class WatchdogSection:
    """A run that does not move is reported and ended (exit code 1)."""

    timeout_s: float = opt(
        1200.0,
        "seconds without a forward pass or a new phase on a rank, or without a sign of life of its "
        "process; phases that wait for engines, rewards and storage do not count. 0: never",
    )

    def __post_init__(self) -> None:
        p = Problems()
        p.not_negative(timeout_s=self.timeout_s)
        p.done()
