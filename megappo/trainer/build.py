"""Puts a run together: the only place that names concrete classes of engines and roles."""

from __future__ import annotations

from pathlib import Path

import torch

from megappo.config import Config
from megappo.config.learning import OptimizerSection
from megappo.distributed.grad_sync import Trainable, make_trainable
from megappo.distributed.parallel import ParallelContext, all_ranks_or_none
from megappo.models.build import build_chunk, transformer_config
from megappo.models.name_map import Head
from megappo.models.spec import ModelSpec
from megappo.models.weights import hf_names, load_hf_weights
from megappo.ppo.kl import AdaptiveKLController, FixedKLController, KLController
from megappo.rewards.scorer import Scorer
from megappo.roles.actor import Actor, Policy
from megappo.roles.base import Network
from megappo.roles.critic import Critic
from megappo.rollout.sampling import SamplingSettings, end_token_ids
from megappo.rollout.sglang_engine import EngineSettings, SGLangEngine
from megappo.rollout.worker import RolloutWorker
from megappo.trainer.estimate import Estimator
from megappo.trainer.evaluate import Evaluator
from megappo.trainer.guard import Guard
from megappo.trainer.ppo_trainer import PPOTrainer, StepPlan
from megappo.trainer.preflight import Preflight, model_paths
from megappo.trainer.scoring import BatchScorer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_trainer(
    config: Config, found: Preflight, context: ParallelContext, *, log_file: Path
) -> PPOTrainer:
    """Models, optimizers and this rank's engine. Collective over the world; takes a while."""
    actor, critic, reference = build_roles(config, found, context)
    with all_ranks_or_none(context, "starting the SGLang engine"):
        engine = SGLangEngine(_engine_settings(config, context, log_file))
    rollouts = RolloutWorker(
        engine=engine,
        context=context,
        seed=config.trainer.seed,
        n=config.rollout.n,
        sampling=_sampling(config),
        weight_names=frozenset(hf_names(found.actor_spec)),
    )
    return PPOTrainer(
        context=context,
        dataset=found.train_set,
        sampler=found.sampler,
        rollouts=rollouts,
        scorer=BatchScorer(
            scorer=make_scorer(config),
            context=context,
            max_error_rate=config.reward.max_error_rate,
        ),
        actor=actor,
        reference=reference,
        critic=critic,
        estimator=Estimator(
            settings=config.algorithm, kl_controller=_kl_controller(config), context=context
        ),
        guard=Guard(settings=config.guard, comparable=not rollouts.sampling.truncates),
        plan=StepPlan(
            mini_batch_prompts=config.actor.mini_batch_size,
            mini_batch=found.plan.samples_per_mini_batch_and_dp_rank,
            actor_micro_batch=config.actor.micro_batch_size,
            critic_micro_batch=config.critic.micro_batch_size,
            ppo_epochs=config.actor.ppo_epochs,
            critic_warmup=config.trainer.critic_warmup,
        ),
    )


def build_evaluator(config: Config, found: Preflight, context: ParallelContext) -> Evaluator | None:
    """Validation, where there are files for it."""
    if found.val_set is None:
        return None
    val = config.rollout.val
    return Evaluator(
        dataset=found.val_set,
        sources=found.val_sources,
        sampling=SamplingSettings(
            max_new_tokens=config.rollout.max_response_length,
            temperature=val.temperature,
            top_p=val.top_p,
            top_k=val.top_k,
            stop=tuple(config.rollout.stop),
            stop_token_ids=end_token_ids(config.model.path),
        ),
        n=val.n,
        scorer=make_scorer(config),
        max_error_rate=config.reward.max_error_rate,
        context=context,
    )


def make_scorer(config: Config) -> Scorer:
    """Rewards by data_source."""
    return Scorer(
        num_threads=config.reward.num_threads,
        max_error_rate=1.0,  # decided over all ranks, by `check_error_rate`
        method=config.reward.gsm8k_method,
    )


def build_network(
    config: Config, spec: ModelSpec, path: str, head: Head, context: ParallelContext
) -> Network:
    """A model of this rank with its weights read. Collective over the world."""
    layout = config.parallel
    settings = transformer_config(
        spec,
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        sequence_parallel=layout.sequence_parallel,
        dtype=DTYPES[config.model.dtype],
        device=context.device.type,
    )
    chunk = build_chunk(
        spec,
        settings,
        head=head,
        pre_process=context.pp_rank == 0,
        post_process=context.is_last_stage,
        value_head_seed=config.trainer.seed,
    )
    load_hf_weights([chunk], path, spec, head=head)
    return Network(spec=spec, config=settings, chunks=[chunk], context=context)


def build_roles(
    config: Config, found: Preflight, context: ParallelContext
) -> tuple[Actor, Critic, Policy | None]:
    """Actor, critic and, where a KL term needs it, reference. Collective over the world."""
    paths = model_paths(config)
    temperature = config.rollout.temperature
    actor_net = build_network(config, found.actor_spec, paths["actor"], "lm", context)
    trainable = _trainable("actor", actor_net, config, config.actor.optim, found)
    actor = Actor(
        policy=Policy(network=actor_net, chunks=trainable.chunks, temperature=temperature),
        trainable=trainable,
        settings=config.actor,
    )
    critic_net = build_network(config, found.critic_spec, paths["critic"], "value", context)
    critic = Critic(
        network=critic_net,
        trainable=_trainable("critic", critic_net, config, config.critic.optim, found),
        settings=config.critic,
    )
    if not config.uses_reference:
        return actor, critic, None
    net = build_network(config, found.reference_spec, paths["reference"], "lm", context)
    for chunk in net.chunks:
        chunk.requires_grad_(False)
    return actor, critic, Policy(network=net, chunks=net.chunks, temperature=temperature)


def _trainable(
    name: str, network: Network, config: Config, optim: OptimizerSection, found: Preflight
) -> Trainable:
    return make_trainable(
        name,
        network.chunks,
        network.config,
        optim=optim,
        total_optimizer_steps=found.total_steps * found.plan.optimizer_steps_per_step,
    )


def _kl_controller(config: Config) -> KLController:
    settings = config.algorithm
    if settings.kl_ctrl == "adaptive":
        return AdaptiveKLController(settings.kl_coef, settings.target_kl, settings.horizon)
    return FixedKLController(settings.kl_coef)


def _sampling(config: Config) -> SamplingSettings:
    rollout = config.rollout
    return SamplingSettings(
        max_new_tokens=rollout.max_response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=tuple(rollout.stop),
        stop_token_ids=end_token_ids(config.model.path),
    )


def _engine_settings(config: Config, context: ParallelContext, log_file: Path) -> EngineSettings:
    on_cuda = context.device.type == "cuda"
    return EngineSettings(
        model_path=Path(config.model.path),
        log_file=log_file,
        device=context.device.type,
        dtype=config.model.dtype,
        context_length=config.data.max_prompt_length + config.rollout.max_response_length,
        max_running_requests=config.rollout.max_running_requests,
        mem_fraction_static=config.rollout.gpu_memory_utilization if on_cuda else None,
        base_gpu_id=context.local_rank if on_cuda else 0,
        local_rank=context.local_rank,
        bucket_bytes=config.rollout.sync_bucket_bytes,
        timeout_s=config.rollout.timeout_s,
        trust_remote_code=config.model.trust_remote_code,
    )
