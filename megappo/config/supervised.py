"""The config of training on given answers: `task: rm` (reward models) and `task: sft`.

Model, layout, optimizer, checkpoints and loggers are the sections that PPO has. One step is one
optimizer step on one batch. Left out: rollouts and everything that follows from them; offload, as
there is no other model that could use the room; and the guards that go back or change settings
(`roll_back`, `lower_lr`, `halve_micro_batch`), which are PPO's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megappo.config.fields import Problems, entries, opt, section
from megappo.config.guard import SUPERVISED_UPDATE_METRICS, GuardRule, WatchdogSection
from megappo.config.layout import ParallelSection
from megappo.config.learning import OptimizerSection
from megappo.config.sections import CheckpointSection, ModelSection
from megappo.config.tracking import TrackingSection

ACTIONS = ("none", "warn", "skip_update", "save_and_stop")

DEFAULT_SUPERVISED_RULES: Mapping[str, GuardRule] = {
    "non_finite": GuardRule(
        metrics=list(SUPERVISED_UPDATE_METRICS), non_finite=True, action="skip_update"
    ),
    "non_finite_again": GuardRule(
        metrics=list(SUPERVISED_UPDATE_METRICS),
        non_finite=True,
        for_steps=3,
        action="save_and_stop",
    ),
    "peak_memory": GuardRule(metrics=["perf/max_memory_share"], above=0.9, action="warn"),
}


@dataclass(frozen=True, kw_only=True)
class ExamplesSection:
    """Rows of a prompt and answers to it, as Parquet files; cells are text or chat messages."""

    train_files: list[str] = opt([], "Parquet files to train on")
    val_files: list[str] = opt([], "Parquet files to validate on")
    prompt_key: str = opt(
        "prompt",
        "column of prompts; empty: a row's answers are whole conversations, whose last message is "
        "the answer",
    )
    chosen_key: str = opt("chosen", "column of answers to learn (sft), or of the better ones (rm)")
    rejected_key: str = opt("rejected", "rm: column of the worse answers")
    margin_key: str = opt(
        "", "rm: column of numbers by which the better score must lead; empty: none"
    )
    train_batch_size: int = opt(64, "pairs (rm) or rows (sft) an optimizer step, all ranks")
    max_length: int = opt(2048, "most tokens of a prompt and one answer")
    too_long: Literal["drop", "error"] = opt(
        "drop", "what is done with a longer row: leave it out (counted), or stop"
    )
    shuffle: bool = opt(True, "new order each epoch, from the seed alone")

    def __post_init__(self) -> None:
        p = Problems()
        p.positive(train_batch_size=self.train_batch_size, max_length=self.max_length)
        p.require(bool(self.chosen_key), "chosen_key", self.chosen_key, "name a column")
        p.require(bool(self.rejected_key), "rejected_key", self.rejected_key, "name a column")
        p.done()


@dataclass(frozen=True, kw_only=True)
class TrainingSection:
    """The loss, its optimizer and its forward passes."""

    optim: OptimizerSection = section(OptimizerSection, "the optimizer")
    center_coef: float = opt(
        0.0, "rm: weight of the mean of (better + worse score)^2, which holds scores near 0"
    )
    micro_batch_size: int = opt(8, "pairs (rm) or rows (sft) a forward pass on one DP rank")
    use_dynamic_bsz: bool = opt(
        False, "fill forward passes up to a number of tokens instead of rows"
    )
    max_token_len_per_gpu: int = opt(
        16384, "with use_dynamic_bsz: most tokens of a forward pass on one rank"
    )
    moe_aux_loss_coeff: float = opt(
        0.0, "weight of the experts' load-balancing loss, a mean over sequences; 0: none"
    )
    recompute: Literal["none", "selective", "full"] = opt(
        "none",
        "activations computed again in the backward pass: none, the core attention's, or whole "
        "layers",
    )

    def __post_init__(self) -> None:
        p = Problems()
        p.not_negative(center_coef=self.center_coef, moe_aux_loss_coeff=self.moe_aux_loss_coeff)
        p.positive(
            micro_batch_size=self.micro_batch_size,
            max_token_len_per_gpu=self.max_token_len_per_gpu,
        )
        p.done()


@dataclass(frozen=True, kw_only=True)
class SupervisedTrainerSection:
    """How long, how often, where to."""

    run_dir: str = opt("runs/default", "the run's folder")
    seed: int = opt(1, "of data order and new weights")
    total_steps: int = opt(0, "steps in all; 0: as many as total_epochs gives")
    total_epochs: int = opt(1, "passes over the data")
    test_freq: int = opt(10, "validate every so many steps and at the end; 0: never")
    val_before_train: bool = opt(True, "validate before the first step")
    save_freq: int = opt(100, "checkpoint every so many steps; 0: only at the end and on a signal")
    profile_steps: list[int] = opt(
        [], "steps of which each rank writes a trace of PyTorch's profiler, to profile/"
    )
    profile_max_gb: float = opt(
        4.0, "growth of a rank's host memory, in GiB, at which its trace ends early"
    )
    device_peak_tflops: float = opt(
        0.0,
        "a device's peak for MFU, in 10^12 operations a second; 0: the datasheet's for bfloat16 on "
        "a GPU that is known, else no MFU",
    )
    distributed_timeout_s: float = opt(1800.0, "a collective that takes longer has failed")
    node_wait_s: float = opt(60.0, "seconds that nodes wait for one another at the start")
    max_wall_time_s: float = opt(
        0.0,
        "seconds after the start (of the launcher, if it has started its ranks again) at which the "
        "run saves and exits with 75; 0: no limit",
    )

    def __post_init__(self) -> None:
        p = Problems()
        p.require(bool(self.run_dir), "run_dir", self.run_dir, "name a folder")
        p.require(
            all(step >= 1 for step in self.profile_steps), "profile_steps", self.profile_steps,
            "steps count from 1",
        )  # fmt: skip
        p.require(self.seed < 2**32, "seed", self.seed, "it must be under 2^32")
        p.not_negative(
            seed=self.seed,
            total_steps=self.total_steps,
            test_freq=self.test_freq,
            save_freq=self.save_freq,
            max_wall_time_s=self.max_wall_time_s,
            device_peak_tflops=self.device_peak_tflops,
        )
        p.positive(
            total_epochs=self.total_epochs,
            profile_max_gb=self.profile_max_gb,
            distributed_timeout_s=self.distributed_timeout_s,
            node_wait_s=self.node_wait_s,
        )
        p.done()


@dataclass(frozen=True, kw_only=True)
class SupervisedGuardSection:
    """What is done when a run's numbers look wrong."""

    check_ranks_every: int = opt(
        100,
        "steps between comparisons of the weights of ranks that hold the same ones, bit for bit; a "
        "difference ends the run (exit code 1); 0: never, as always under parallel.fsdp",
    )
    rules: dict[str, GuardRule] = entries(
        GuardRule, DEFAULT_SUPERVISED_RULES, "rules by name; a default one keeps what is not set"
    )
    max_actions: int = opt(
        10, "updates that may be skipped in a run's life; the next stops it (exit code 3)"
    )

    def __post_init__(self) -> None:
        p = Problems()
        p.not_negative(check_ranks_every=self.check_ranks_every, max_actions=self.max_actions)
        for name, rule in self.rules.items():
            p.require(
                rule.action in ACTIONS, f"rules.{name}.action", rule.action,
                f"training on given answers knows {', '.join(ACTIONS)}; the others are PPO's",
            )  # fmt: skip
        p.done()


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig:
    """The whole of a run of `megappo train-rm` or `megappo train-sft`."""

    task: Literal["rm", "sft"] = opt(
        "rm", "rm: a Bradley-Terry reward model from pairs of answers; sft: imitate the answers"
    )
    device: Literal["auto", "cpu", "cuda"] = opt("auto", "as for PPO")
    model: ModelSection = section(ModelSection, "starting point")
    data: ExamplesSection = section(ExamplesSection, "rows")
    training: TrainingSection = section(TrainingSection, "loss and optimizer")
    parallel: ParallelSection = section(ParallelSection, "layout")
    trainer: SupervisedTrainerSection = section(SupervisedTrainerSection, "run")
    checkpoint: CheckpointSection = section(CheckpointSection, "saving")
    guard: SupervisedGuardSection = section(SupervisedGuardSection, "guards")
    watchdog: WatchdogSection = section(WatchdogSection, "hangs")
    loggers: list[str] = opt(["console", "jsonl", "tensorboard"], "where metrics go")
    tracking: TrackingSection = section(TrackingSection, "names in wandb and mlflow")
