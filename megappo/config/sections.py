"""The config's sections: keyword-only, read-only dataclasses. Defaults live here and nowhere else.

Each section checks itself in `__post_init__`; rules between sections stand in `checks.py`. Fields
that verl has too carry verl's key, so that somebody who comes from there is told our name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megappo.config.fields import Problems, opt, section
from megappo.config.guard import GuardSection, WatchdogSection
from megappo.config.layout import ParallelSection
from megappo.config.learning import (
    ActorSection,
    AlgorithmSection,
    CriticSection,
    ReferenceSection,
)
from megappo.config.reward_model import RewardModelSection
from megappo.config.rewards import RewardSection
from megappo.config.tracking import TrackingSection

A = "actor_rollout_ref.actor."
R = "actor_rollout_ref.rollout."


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The actor's starting point."""

    path: str = opt("", "Hugging Face folder of the actor", verl="actor_rollout_ref.model.path")
    dtype: Literal["float32", "bfloat16"] = opt(
        "bfloat16", "type of weights and activations, trainer and engine alike"
    )
    fp8: Literal["none", "e4m3", "hybrid"] = opt(
        "none", "format of the trainer's matrix products, by Transformer Engine; CUDA only",
        verl=A + "megatron.override_transformer_config.fp8",
    )  # fmt: skip
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = opt(
        "blockwise", "how fp8 products are scaled; mxfp8 needs Blackwell",
        verl=A + "megatron.override_transformer_config.fp8_recipe",
    )  # fmt: skip
    trust_remote_code: bool = opt(
        False, "run Python code that lies in model folders",
        verl="actor_rollout_ref.model.trust_remote_code",
    )  # fmt: skip

    def __post_init__(self) -> None:
        p = Problems()
        p.require(
            self.fp8 == "none" or self.dtype == "bfloat16",
            "fp8", self.fp8, "fp8 products need dtype bfloat16",
        )  # fmt: skip
        p.done()


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Prompts, as Parquet files with columns `prompt`, `data_source`, `ground_truth`."""

    train_files: list[str] = opt([], "Parquet files to train on", verl="data.train_files")
    val_files: list[str] = opt([], "Parquet files to validate on", verl="data.val_files")
    prompt_key: str = opt("prompt", "column of chat messages or text", verl="data.prompt_key")
    train_batch_size: int = opt(256, "prompts a step, all ranks", verl="data.train_batch_size")
    max_prompt_length: int = opt(
        512, "most tokens of a rendered prompt", verl="data.max_prompt_length"
    )
    truncation: Literal["error", "left", "drop"] = opt(
        "error", "what is done with a longer prompt: stop, keep its last tokens, leave the row out",
        verl="data.truncation",
    )  # fmt: skip
    shuffle: bool = opt(True, "new order each epoch, from the seed alone", verl="data.shuffle")
    source_weights: dict[str, float] = opt(
        {}, "relative share of each data_source in a step's prompts; not named 1, left out 0"
    )
    curriculum: Literal["none", "score"] = opt(
        "none", "score: prompts without a score first, then those whose score is near a target"
    )
    curriculum_target: float = opt(0.5, "score that curriculum draws most")
    curriculum_width: float = opt(
        0.5, "distance from curriculum_target at which a prompt's chance is down to the floor"
    )
    curriculum_floor: float = opt(0.1, "least chance of a prompt, relative to one at the target")
    curriculum_smoothing: float = opt(
        0.5, "part of the latest mean score in a prompt's score; 1 forgets all earlier ones"
    )

    def __post_init__(self) -> None:
        p = Problems()
        p.positive(
            train_batch_size=self.train_batch_size,
            max_prompt_length=self.max_prompt_length,
            curriculum_width=self.curriculum_width,
            curriculum_floor=self.curriculum_floor,
            curriculum_smoothing=self.curriculum_smoothing,
        )
        p.not_negative(**{f"source_weights.{k}": v for k, v in self.source_weights.items()})
        for name, value in (
            ("curriculum_floor", self.curriculum_floor),
            ("curriculum_smoothing", self.curriculum_smoothing),
        ):
            p.require(not value > 1, name, value, "it must be at most 1")
        p.require(
            math.isfinite(self.curriculum_target),
            "curriculum_target", self.curriculum_target, "it must be finite",
        )  # fmt: skip
        p.require(
            not (self.source_weights and self.curriculum != "none"),
            "curriculum", self.curriculum,
            "it chooses prompts by score, which source_weights does by source; set it to none, or "
            "leave source_weights empty",
        )  # fmt: skip
        p.done()


@dataclass(frozen=True, kw_only=True)
class ValSamplingSection:
    """How validation samples; temperature 0 takes the likeliest token."""

    temperature: float = opt(0.0, "0 is greedy", verl=R + "val_kwargs.temperature")
    top_p: float = opt(1.0, "nucleus", verl=R + "val_kwargs.top_p")
    top_k: int = opt(-1, "-1 keeps all", verl=R + "val_kwargs.top_k")
    min_p: float = opt(0.0, "0 keeps all")
    n: int = opt(1, "responses a validation prompt", verl=R + "val_kwargs.n")
    max_response_length: int = opt(0, "most tokens of a response; 0: as many as in training")

    def __post_init__(self) -> None:
        p = Problems()
        p.not_negative(temperature=self.temperature, max_response_length=self.max_response_length)
        p.positive(n=self.n)
        p.require(0 < self.top_p <= 1, "top_p", self.top_p, "it must lie in (0, 1]")
        p.require(self.top_k == -1 or self.top_k > 0, "top_k", self.top_k, "-1, or over 0")
        p.require(0 <= self.min_p < 1, "min_p", self.min_p, "it must lie in [0, 1)")
        p.done()


@dataclass(frozen=True, kw_only=True)
class RolloutSection:
    """Generation, one engine for each `tp` consecutive ranks."""

    engine: Literal["sglang", "megatron"] = opt(
        "sglang",
        "what generates: SGLang's processes, or the trained weights themselves in the trainer's "
        "process (for debugging and as an oracle; gpu_memory_utilization, sync_bucket_bytes and "
        "timeout_s are SGLang's alone)",
        verl=R + "name",
    )
    n: int = opt(1, "responses a prompt", verl=R + "n")
    tp: int = opt(
        1,
        "consecutive ranks of one node that share an engine, which splits the model over as many "
        "devices; independent of parallel.*",
        verl=R + "tensor_model_parallel_size",
    )
    temperature: float = opt(1.0, "every log-prob is of logits/temperature", verl=R + "temperature")
    top_p: float = opt(1.0, "nucleus; 1 keeps all", verl=R + "top_p")
    top_k: int = opt(-1, "likeliest tokens kept; -1 keeps all", verl=R + "top_k")
    min_p: float = opt(
        0.0, "share of the likeliest token's probability that a kept one has at least; 0 keeps all"
    )
    stop: list[str] = opt([], "strings that end a response, besides the model's end tokens")
    stop_token_ids: list[int] = opt(
        [], "tokens that end a response and are cut from its text, besides the model's end tokens"
    )
    max_response_length: int = opt(
        512, "most tokens of a response", verl="data.max_response_length"
    )
    max_running_requests: int = opt(256, "requests an engine runs at once", verl=R + "max_num_seqs")
    gpu_memory_utilization: float = opt(
        0.5, "the engine's share of the device's memory", verl=R + "gpu_memory_utilization"
    )
    sync_bucket_bytes: int = opt(
        64 * 1024 * 1024,
        "weights go to the engine in buckets of at most this size; shared memory for two of them "
        "stays on the CPU, on CUDA it lasts for the push",
    )
    verify_sync: Literal["never", "first", "always"] = opt(
        "first",
        "compare checksums of chosen weights in the engine with what was sent: never, after an "
        "engine's first push, or after each",
    )
    url: list[str] = opt(
        [],
        "SGLang servers that somebody else runs, http://HOST:PORT each; used in place of engines "
        "of our own (their memory, cache, running requests and split are then their own matter)",
    )
    api_key_env: str = opt(
        "",
        "environment variable that holds the servers' API key; empty: none is sent",
    )
    sync_address: str = opt(
        "",
        "this host's address as the servers reach it, to take weights from; empty: that of the "
        "way to each server",
    )
    server_wait_s: float = opt(
        300.0,
        "seconds that a server may take to be healthy, at the start and after it has failed; then "
        "the run saves and ends",
    )
    timeout_s: float = opt(
        600.0,
        "seconds: an engine that sends no token and no answer for so long has failed, and is "
        "replaced; a long generation that gets on has not",
    )
    max_restarts: int = opt(
        3, "engines that may be replaced on a rank in a run; the next failure saves and ends it"
    )
    sleep: bool = opt(
        False,
        "engines give the memory of weights and cache back while the trainer works; CUDA: needs "
        "the package torch_memory_saver",
        verl=R + "free_cache_engine",
    )
    val: ValSamplingSection = section(ValSamplingSection, "sampling for validation")

    @property
    def truncates(self) -> bool:
        """Whether training leaves out tokens: no log-prob over all words is then the draw's."""
        return self.top_p < 1 or self.top_k != -1 or self.min_p > 0

    @property
    def val_response_length(self) -> int:
        """Most tokens of a validation response."""
        return self.val.max_response_length or self.max_response_length

    def __post_init__(self) -> None:
        p = Problems()
        p.require(
            self.temperature > 0, "temperature", self.temperature,
            "it must be over 0 to train (log-probs are of logits/temperature); "
            "rollout.val.temperature may be 0",
        )  # fmt: skip
        p.positive(
            n=self.n,
            tp=self.tp,
            max_response_length=self.max_response_length,
            max_running_requests=self.max_running_requests,
            sync_bucket_bytes=self.sync_bucket_bytes,
            timeout_s=self.timeout_s,
            server_wait_s=self.server_wait_s,
        )
        p.not_negative(max_restarts=self.max_restarts)
        p.require(0 < self.top_p <= 1, "top_p", self.top_p, "it must lie in (0, 1]")
        p.require(self.top_k == -1 or self.top_k > 0, "top_k", self.top_k, "-1, or over 0")
        p.require(0 <= self.min_p < 1, "min_p", self.min_p, "it must lie in [0, 1)")
        p.require(all(self.stop), "stop", self.stop, "a stop string must not be empty")
        p.require(
            all(token >= 0 for token in self.stop_token_ids), "stop_token_ids", self.stop_token_ids,
            "a token id is 0 or more",
        )  # fmt: skip
        p.within(0.05, 0.95, gpu_memory_utilization=self.gpu_memory_utilization)
        p.done()


@dataclass(frozen=True, kw_only=True)
class TrainerSection:
    """How long, how often, where to."""

    run_dir: str = opt("runs/default", "the run's folder", verl="trainer.default_local_dir")
    seed: int = opt(1, "of data order, sampling and new weights")
    total_steps: int = opt(
        0, "steps in all; 0: as many as total_epochs gives", verl="trainer.total_training_steps"
    )
    total_epochs: int = opt(1, "passes over the data", verl="trainer.total_epochs")
    test_freq: int = opt(
        10, "validate every so many steps and at the end; 0: never", verl="trainer.test_freq"
    )
    val_before_train: bool = opt(
        True, "validate before the first step", verl="trainer.val_before_train"
    )
    save_freq: int = opt(
        20,
        "checkpoint every so many steps; 0: only at the end and on a signal",
        verl="trainer.save_freq",
    )
    balance_batch: bool = opt(
        True, "deal samples out to DP ranks so that each has the same work",
        verl="trainer.balance_batch",
    )  # fmt: skip
    critic_warmup: int = opt(
        0, "steps in which the critic alone is trained", verl="trainer.critic_warmup"
    )
    rollouts_per_step: int = opt(32, "samples written to rollouts/ a step; -1: all; 0: none")
    rollout_tokens_per_sample: int = opt(
        512, "tokens of each such sample whose text and log-prob are written too; 0: none"
    )
    profile_steps: list[int] = opt(
        [], "steps of which each rank writes a trace of PyTorch's profiler, to profile/",
        verl="global_profiler.steps",
    )  # fmt: skip
    profile_max_gb: float = opt(
        4.0, "growth of a rank's host memory, in GiB, at which its trace ends early"
    )
    device_peak_tflops: float = opt(
        0.0,
        "a device's peak for MFU, in 10^12 operations a second; 0: the datasheet's for bfloat16 on "
        "a GPU that is known, else no MFU",
    )
    distributed_timeout_s: float = opt(
        1800.0,
        "a collective that takes longer has failed; in one, ranks wait for the slowest generation",
    )
    node_wait_s: float = opt(60.0, "how long the nodes of a run wait for each other at its start")
    max_wall_time_s: float = opt(
        0.0,
        "seconds after the start (of the launcher, if it has started its ranks again) at which the "
        "run saves and exits with 75, as on a signal; leave room for an update, or a validation "
        "that has begun, and a save; 0: no limit",
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
            critic_warmup=self.critic_warmup,
            rollout_tokens_per_sample=self.rollout_tokens_per_sample,
            max_wall_time_s=self.max_wall_time_s,
            device_peak_tflops=self.device_peak_tflops,
        )
        p.positive(
            total_epochs=self.total_epochs,
            distributed_timeout_s=self.distributed_timeout_s,
            node_wait_s=self.node_wait_s,
            profile_max_gb=self.profile_max_gb,
        )
        p.require(
            self.rollouts_per_step >= -1, "rollouts_per_step", self.rollouts_per_step, "-1 or more"
        )
        p.done()


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """Saving, resuming and the final export."""

    resume: Literal["auto", "never"] = opt(
        "auto", "auto goes on from checkpoints/latest; never refuses a folder that has any",
        verl="trainer.resume_mode",
    )  # fmt: skip
    async_save: bool = opt(
        True,
        "copy the state to host memory and write it while training goes on; in line where host "
        "memory is short, and always under parallel.fsdp",
    )
    on_failure: Literal["continue", "stop"] = opt(
        "continue",
        "after a save that failed: continue tries again after the next step, stop ends the run",
    )
    keep: int = opt(2, "newest checkpoints kept", verl="trainer.max_actor_ckpt_to_keep")
    keep_every: int = opt(0, "also those whose step is a multiple of it, for good; 0: none")
    keep_best: bool = opt(
        False,
        "also the one of the highest val/score/mean, of those saved after a validation; with a "
        "reward model, of its and the rules' weighted sum",
    )
    export_hf: bool = opt(True, "write the actor as a Hugging Face folder at the end")

    def __post_init__(self) -> None:
        p = Problems()
        p.positive(keep=self.keep)
        p.not_negative(keep_every=self.keep_every)
        p.done()


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole of a run."""

    task: Literal["ppo"] = opt(
        "ppo", "what is trained; rm and sft have keys of their own, in the second table"
    )
    device: Literal["auto", "cpu", "cuda"] = opt(
        "auto",
        "cuda: NCCL, Transformer Engine; cpu: gloo, local layers; auto: cuda where there is one",
        verl="trainer.device",
    )  # fmt: skip
    model: ModelSection = section(ModelSection, "actor")
    data: DataSection = section(DataSection, "prompts")
    rollout: RolloutSection = section(RolloutSection, "generation")
    algorithm: AlgorithmSection = section(AlgorithmSection, "advantages")
    actor: ActorSection = section(ActorSection, "policy loss")
    critic: CriticSection = section(CriticSection, "value model")
    reference: ReferenceSection = section(ReferenceSection, "reference policy")
    reward: RewardSection = section(RewardSection, "rewards")
    reward_model: RewardModelSection = section(RewardModelSection, "reward model")
    parallel: ParallelSection = section(ParallelSection, "layout")
    trainer: TrainerSection = section(TrainerSection, "run")
    checkpoint: CheckpointSection = section(CheckpointSection, "saving")
    guard: GuardSection = section(GuardSection, "guards")
    watchdog: WatchdogSection = section(WatchdogSection, "hangs")
    loggers: list[str] = opt(
        ["console", "jsonl", "tensorboard"],
        "where metrics go: console, jsonl, tensorboard, wandb, mlflow",
        verl="trainer.logger",
    )
    tracking: TrackingSection = section(TrackingSection, "names in wandb and mlflow")

    @property
    def uses_critic(self) -> bool:
        """Whether a value model is built and trained."""
        return self.algorithm.traits.uses_critic

    @property
    def trained_roles(self) -> dict[str, ActorSection | CriticSection]:
        """The sections of the models that are trained, by name."""
        roles: dict[str, ActorSection | CriticSection] = {"actor": self.actor}
        return roles | {"critic": self.critic} if self.uses_critic else roles

    @property
    def uses_reference(self) -> bool:
        """Whether any term needs the reference's log-probs."""
        in_loss = self.actor.use_kl_loss and self.actor.kl_loss_coef > 0
        return in_loss or self.algorithm.use_kl_in_reward
