"""Choices that are legal and have cost others days: each is a warning with its reason.

Only what is nearly always a mistake, or is easily not known, is said: a warning that every run
shows is not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from megappo.config import Config
from megappo.config.batch_plan import BatchPlan
from megappo.models.spec import ModelSpec

_WIDE_CLIP = 0.5
_HIGH_ENTROPY_COEFF = 0.01
_LOW_RATE = 1e-7
_HIGH_RATE = 2e-5
_LARGE_HIDDEN = 1024
"""Models this wide and wider: rates over `_HIGH_RATE` have destroyed them."""


def risks(
    config: Config,
    specs: Mapping[str, ModelSpec],
    plan: BatchPlan,
    *,
    total_steps: int,
    local_world_size: int,
) -> list[str]:
    """Every warning about a run whose settings are all allowed.

    Args:
        config: of the run.
        specs: of the roles.
        plan: its batch arithmetic.
        total_steps: of the run.
        local_world_size: ranks of a node.
    """
    optimizer_steps = total_steps * plan.optimizer_steps_per_step
    return [
        *_policy(config),
        *_rates(config, specs, optimizer_steps),
        *_data(config, plan),
        *_layout(config, specs, local_world_size),
        *_saving(config, total_steps),
    ]


def _policy(config: Config) -> Iterator[str]:
    """What keeps the policy near where it started."""
    actor, algorithm = config.actor, config.algorithm
    clips = actor.optim.clip_grad > 0 and actor.clip_high < _WIDE_CLIP
    if not config.uses_reference and not clips:
        yield (
            "no KL to the reference is in use (actor.use_kl_loss, algorithm.use_kl_in_reward), "
            f"and actor.clip_ratio_high is {actor.clip_high:g} and actor.optim.clip_grad "
            f"{actor.optim.clip_grad:g}: nothing holds the policy; use a KL "
            "term, or clip both (0.2, 1)"
        )
    elif not actor.optim.clip_grad:
        yield (
            "actor.optim.clip_grad is 0: one batch with a large gradient can undo the training; 1 "
            "is usual"
        )
    if actor.clip_high < actor.clip_low:
        yield (
            f"actor.clip_ratio_high {actor.clip_high:g} is under actor.clip_ratio_low "
            f"{actor.clip_low:g}: good tokens may gain less than bad ones lose, and entropy "
            "collapses; the other way round is usual"
        )
    if algorithm.use_kl_in_reward and actor.use_kl_loss and actor.kl_loss_coef > 0:
        yield (
            "the KL to the reference is in the reward and in the loss: the policy is held twice; "
            "set actor.use_kl_loss=false or algorithm.use_kl_in_reward=false"
        )
    if actor.entropy_coeff > _HIGH_ENTROPY_COEFF:
        yield (
            f"actor.entropy_coeff is {actor.entropy_coeff:g}: over a vocabulary of words a bonus "
            "over 0.01 has made texts random; 0 to 0.001 is usual"
        )
    length = config.rollout.max_response_length
    if algorithm.gamma**length < 0.1:
        yield (
            f"algorithm.gamma is {algorithm.gamma:g}: of a reward at the end of "
            f"{length} tokens the first one sees {algorithm.gamma**length:.1e}; 1 is usual "
            "for texts"
        )
    if not 0.5 <= config.rollout.temperature <= 1.5:
        yield (
            f"rollout.temperature is {config.rollout.temperature:g}: far from 1 the policy that is "
            "trained (of logits / temperature) is not the one that is used later"
        )


def _rates(config: Config, specs: Mapping[str, ModelSpec], optimizer_steps: int) -> Iterator[str]:
    """Learning rates against precision, size and length of the run."""
    optim, critic = config.actor.optim, config.critic.optim
    if config.model.dtype == "bfloat16" and 0 < optim.lr < _LOW_RATE:
        # bfloat16 has 8 bits of precision; Adam moves a weight by about the rate a step.
        needed = 0.01 * 2**-8 / optim.lr
        yield (
            f"actor.optim.lr is {optim.lr:g} and model.dtype bfloat16: a weight of 0.01 changes "
            f"for the forward pass and the engine only after about {needed:,.0f} optimizer steps "
            f"in one direction, and the run has {optimizer_steps:,}; raise the rate, or use "
            "float32"
        )
    large = [spec for role, spec in specs.items() if role == "actor"]
    if large and large[0].hidden_size >= _LARGE_HIDDEN and optim.lr > _HIGH_RATE:
        yield (
            f"actor.optim.lr is {optim.lr:g} for a model of width {large[0].hidden_size}: 1e-7 to "
            "5e-6 is usual, and more has destroyed what the model knew within some steps"
        )
    for name, settings in config.trained_roles.items():
        if settings.optim.lr_warmup_steps >= optimizer_steps > 0:
            yield (
                f"{name}.optim.lr_warmup_steps is {settings.optim.lr_warmup_steps} and the run has "
                f"{optimizer_steps} optimizer steps: the rate never reaches {name}.optim.lr"
            )
    if config.uses_critic and critic.lr < optim.lr:
        yield (
            f"critic.optim.lr {critic.lr:g} is under actor.optim.lr {optim.lr:g}: advantages then "
            "lag behind the policy; a critic usually learns ten times faster"
        )


def _data(config: Config, plan: BatchPlan) -> Iterator[str]:
    """What is learned from, and what is measured."""
    data, actor = config.data, config.actor
    if actor.mini_batch_size * config.rollout.n == 1:
        yield (
            "actor.mini_batch_size is 1 and rollout.n 1: every optimizer step follows one "
            "response, whose advantage is mostly noise; 32 and more samples are usual"
        )
    updates = plan.optimizer_steps_per_step
    if updates > 64:
        yield (
            f"{updates} optimizer steps follow each generation (data.train_batch_size, "
            "actor.mini_batch_size, actor.ppo_epochs): the last of them learn from samples of a "
            "policy that is long gone, and clipping stops most of it; 1 to 16 is usual"
        )
    both = {Path(f).resolve() for f in data.train_files} & {
        Path(f).resolve() for f in data.val_files
    }
    if both and (config.trainer.test_freq or config.trainer.val_before_train):
        names = ", ".join(str(path) for path in sorted(both))
        yield f"{names} is in data.train_files and data.val_files: val/score measures memory"
    if data.truncation == "left":
        yield (
            f"data.truncation is left: a prompt over {data.max_prompt_length} tokens loses its "
            "beginning, which is the system text and often the question; drop leaves such rows out"
        )


def _layout(config: Config, specs: Mapping[str, ModelSpec], local_world_size: int) -> Iterator[str]:
    """How the layout lies on nodes and devices."""
    layout = config.parallel
    if local_world_size % layout.tp:
        yield (
            f"parallel.tp is {layout.tp} and a node has {local_world_size} ranks: some TP groups "
            "lie on two nodes, and two all-reduces a layer then cross the network; use a TP that "
            f"divides {local_world_size}, and parallel.pp for the rest"
        )
    if any(spec.num_experts for spec in specs.values()) and layout.ep > 1:
        span = layout.ep * layout.expert_tp
        if local_world_size % span:
            yield (
                f"parallel.ep {layout.ep} x expert TP {layout.expert_tp} = {span} ranks and a node "
                f"has {local_world_size}: every token crosses the network twice in each layer with "
                "experts; this is slow without a fast fabric"
            )
    keeps = not config.rollout.sleep and not config.rollout.url
    share = config.rollout.gpu_memory_utilization
    if keeps and share > 0.6 and config.device != "cpu" and config.rollout.engine == "sglang":
        yield (
            f"rollout.gpu_memory_utilization is {share:g} without rollout.sleep: the engine keeps "
            "that share of the device while the trainer works, which has the rest alone; lower it, "
            "or set rollout.sleep=true"
        )
    if config.model.dtype == "float32" and config.device == "cuda":
        yield "model.dtype is float32 on CUDA: twice the memory and a fraction of the speed"


def _saving(config: Config, total_steps: int) -> Iterator[str]:
    """What a crash costs."""
    freq = config.trainer.save_freq
    if total_steps >= 100 and (not freq or freq >= total_steps):
        yield (
            f"trainer.save_freq is {freq} and the run has {total_steps} steps: a crash loses all "
            "of it; save at least every hour"
        )
