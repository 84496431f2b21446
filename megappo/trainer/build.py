"""Puts a run together: here and in `build_engine` alone are classes of engines and roles named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from megappo.config import Config, SupervisedConfig
from megappo.config.learning import ActorSection, CriticSection
from megappo.config.lora import LoraSection
from megappo.data.cost import SequenceCost
from megappo.distributed.grad_sync import Trainable, make_trainable
from megappo.distributed.memory_agreement import MemoryAgreement
from megappo.distributed.offload import Offloader, chosen_parts
from megappo.distributed.parallel import (
    ParallelContext,
    all_ranks_or_none,
)
from megappo.models.build import Recompute, build_chunk, transformer_config
from megappo.models.lora import add_adapters
from megappo.models.name_map import Head
from megappo.models.spec import ModelSpec
from megappo.models.weights import hf_names, load_hf_weights
from megappo.rewards.scorer import Scorer
from megappo.roles.actor import Actor, Policy
from megappo.roles.base import Network
from megappo.roles.critic import Critic
from megappo.roles.policy_losses import POLICY_LOSSES
from megappo.roles.reward_model import RewardModel
from megappo.rollout.engine import RolloutEngine
from megappo.rollout.recovery import EngineKeeper
from megappo.rollout.sampling import SamplingSettings
from megappo.rollout.worker import RolloutWorker
from megappo.trainer.balance import Balancer
from megappo.trainer.build_collector import make_collector
from megappo.trainer.build_engine import make_engine, make_placement, make_sampling, stop_token_ids
from megappo.trainer.corrector import Correction, Corrector
from megappo.trainer.estimate import make_estimator, make_kl_controller
from megappo.trainer.evaluate import Evaluator
from megappo.trainer.guard import Guard
from megappo.trainer.memory import ModelMemory
from megappo.trainer.micro_batches import MicroBatchPlanner
from megappo.trainer.model_scoring import ModelScorer
from megappo.trainer.ppo_trainer import PPOTrainer, StepPlan
from megappo.trainer.preflight import Preflight, model_paths, wanted_layers
from megappo.trainer.scoring import BatchScorer
from megappo.trainer.utilization import Utilization, peak_flops_per_s

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_trainer(
    config: Config, found: Preflight, context: ParallelContext, *, log_file: Path
) -> PPOTrainer:
    """Models, optimizers and this rank's engine. Collective over the world; takes a while."""
    actor, critic, reference = build_roles(
        config,
        model_specs(found),
        context,
        total_optimizer_steps=found.total_steps * found.plan.optimizer_steps_per_step,
    )
    mini_batch = found.plan.samples_per_mini_batch_and_dp_rank
    placement = make_placement(config, context)

    def start_engine() -> RolloutEngine:
        return make_engine(config, found, context, actor, log_file)

    with all_ranks_or_none(context, f"starting the {config.rollout.engine} engine"):
        engine = EngineKeeper(
            start_engine if placement.owns_engine else None,
            context=context,
            weights=hf_names(found.actor_spec),
            max_restarts=config.rollout.max_restarts,
        )
    rollouts = RolloutWorker(
        engine=engine,
        placement=placement,
        context=context,
        seed=config.trainer.seed,
        n=config.rollout.n,
        sampling=make_sampling(config),
        sleeps=config.rollout.sleep,
    )
    scorer = BatchScorer(
        scorer=make_scorer(config),
        sources=found.train_sources,
        context=context,
        model=build_model_scorer(config, found.reward_spec, context),
    )
    return PPOTrainer(
        context=context,
        sampler=found.sampler,
        rollouts=rollouts,
        collector=make_collector(config, found, rollouts, scorer),
        actor=actor,
        reference=reference,
        critic=critic,
        estimator=make_estimator(config.algorithm, make_kl_controller(config.algorithm), context),
        guard=Guard(settings=config.guard, comparable=not rollouts.sampling.truncates),
        plan=StepPlan(
            mini_batch=mini_batch,
            actor=make_planner(config.actor, actor.policy.network, mini_batch),
            critic=make_planner(config.critic, critic.network, mini_batch) if critic else None,
            ppo_epochs=config.actor.ppo_epochs,
            critic_warmup=config.trainer.critic_warmup,
        ),
        balancer=_balancer(config, found, context, mini_batch),
        corrector=make_corrector(config),
        memory=ModelMemory(
            trained=tuple(role.trainable for role in (actor, critic) if role is not None),
            reference=None if reference is None or reference.without_adapters else reference.memory,
        ),
        utilization=Utilization(
            specs={
                role: spec
                for role, spec in (("actor", found.actor_spec), ("critic", found.critic_spec))
                if spec is not None
            },
            peak_flops_per_s=peak_flops_per_s(config, context.device),
        ),
        memory_agreement=MemoryAgreement(context, config.parallel),
    )


def build_model_scorer(
    config: Config, spec: ModelSpec | None, context: ParallelContext
) -> ModelScorer | None:
    """The frozen reward model, where one is named. Collective over the world."""
    if spec is None:
        return None
    settings = config.reward_model
    net = build_network(config, spec, settings.path, "value", context)
    for chunk in net.chunks:
        chunk.requires_grad_(False)
    parts = chosen_parts(params=settings.param_offload, grads=False, optimizer=False)
    memory = Offloader("reward model", net.chunks, parts=parts)
    memory.offload()
    return ModelScorer(
        model=RewardModel(network=net, memory=memory),
        planner=MicroBatchPlanner.of(
            settings, context=context, alignment=net.alignment, mini_batch=1
        ),
        settings=settings,
        context=context,
    )


def model_specs(found: Preflight) -> dict[str, ModelSpec]:
    """The shapes that `build_roles` wants, by role."""
    specs = {"actor": found.actor_spec, "reference": found.reference_spec}
    return specs if found.critic_spec is None else specs | {"critic": found.critic_spec}


def make_planner(
    role: ActorSection | CriticSection, network: Network, mini_batch: int
) -> MicroBatchPlanner:
    """How a role's samples are cut into forward passes; `mini_batch` is samples on a DP rank."""
    return MicroBatchPlanner.of(
        role, context=network.context, alignment=network.alignment, mini_batch=mini_batch
    )


def _balancer(
    config: Config, found: Preflight, context: ParallelContext, mini_batch: int
) -> Balancer | None:
    if not config.trainer.balance_batch or context.dp == 1:
        return None
    return Balancer(
        context=context,
        cost=SequenceCost.of_model(found.actor_spec),
        samples_per_mini_batch=mini_batch,
    )


def make_corrector(config: Config) -> Corrector | None:
    """What is done about the engine-trainer gap, if anything."""
    settings = config.algorithm

    def correction(level: str, threshold: float) -> Correction | None:
        return None if level == "none" else Correction(level=level, threshold=threshold)

    weigh = correction(settings.rollout_is, settings.rollout_is_threshold)
    reject = correction(settings.rollout_rs, settings.rollout_rs_threshold)
    return Corrector(weigh=weigh, reject=reject) if weigh or reject else None


def build_evaluator(
    config: Config, found: Preflight, context: ParallelContext, scorer: BatchScorer
) -> Evaluator | None:
    """Validation, where there are files for it; with the rewards of training."""
    if found.val_set is None:
        return None
    val = config.rollout.val
    return Evaluator(
        dataset=found.val_set,
        sources=found.val_sources,
        sampling=SamplingSettings(
            max_new_tokens=config.rollout.val_response_length,
            temperature=val.temperature,
            top_p=val.top_p,
            top_k=val.top_k,
            min_p=val.min_p,
            stop=tuple(config.rollout.stop),
            stop_token_ids=stop_token_ids(config),
        ),
        n=val.n,
        scorer=scorer.scorer,
        context=context,
        model=scorer.model,
    )


def make_scorer(config: Config) -> Scorer:
    """Rewards by data_source. Too many failures are decided over all ranks: `check_error_rate`."""
    return Scorer(config.reward, max_error_rate=1.0)


def build_network(
    config: Config | SupervisedConfig,
    spec: ModelSpec,
    path: str,
    head: Head,
    context: ParallelContext,
    *,
    recompute: Recompute = "none",
    lora: LoraSection | None = None,
) -> Network:
    """A model of this rank with its weights read, and new adapters. Collective over the world."""
    layout = config.parallel
    settings = transformer_config(
        spec,
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        vp=layout.vpp,
        ep=layout.ep if spec.num_experts else 1,
        etp=layout.expert_tp if spec.num_experts else None,
        pipeline_layers=wanted_layers(config.parallel, spec),
        sequence_parallel=layout.sequence_parallel,
        dtype=DTYPES[config.model.dtype],
        device=context.device.type,
        recompute=recompute,
        fp8=config.model.fp8,
        fp8_recipe=config.model.fp8_recipe,
    )
    chunks = [
        build_chunk(
            spec,
            settings,
            head=head,
            pre_process=context.pp_rank == 0 and number == 0,
            post_process=context.is_last_stage and number == context.vp - 1,
            vp_stage=number if context.vp > 1 else None,
            value_head_seed=config.trainer.seed,
        )
        for number in range(context.vp)
    ]
    load_hf_weights(chunks, path, spec, head=head)
    if lora is not None and lora.rank:
        add_adapters(chunks, lora, seed=config.trainer.seed)
    return Network(spec=spec, config=settings, chunks=chunks, context=context, packed=layout.packed)


def build_roles(
    config: Config,
    specs: Mapping[str, ModelSpec],
    context: ParallelContext,
    *,
    total_optimizer_steps: int,
) -> tuple[Actor, Critic | None, Policy | None]:
    """Actor, a critic for an estimator that needs it, a reference for a KL term that does.

    Collective over the world.

    Args:
        config: of the run.
        specs: of the models `actor`, `reference` and, where it is needed, `critic`.
        context: this rank's place.
        total_optimizer_steps: length of the learning-rate decay.
    """
    paths = model_paths(config)
    temperature = config.rollout.temperature

    def network(
        role: str, head: Head, recompute: Recompute, lora: LoraSection | None = None
    ) -> Network:
        return build_network(
            config, specs[role], paths[role], head, context, recompute=recompute, lora=lora
        )

    def trainable(name: str, net: Network, role: ActorSection | CriticSection) -> Trainable:
        made = make_trainable(
            name,
            net.chunks,
            net.config,
            optim=role.optim,
            total_optimizer_steps=total_optimizer_steps,
            overlap_grad_reduce=config.parallel.overlap_grad_reduce,
            overlap_param_gather=config.parallel.overlap_param_gather,
            fsdp=config.parallel.fsdp,
            offload=chosen_parts(
                params=role.memory.param_offload,
                grads=role.memory.grad_offload,
                optimizer=role.memory.optimizer_offload,
            ),
        )
        # At once, so that the next model and the engine find the memory free.
        if made.memory is not None:
            made.memory.offload()
        return made

    actor_net = network("actor", "lm", config.actor.memory.recompute, config.actor.lora)
    actor_trainable = trainable("actor", actor_net, config.actor)
    actor = Actor(
        policy=Policy(
            network=actor_net,
            chunks=actor_trainable.chunks,
            temperature=temperature,
            memory=actor_trainable.memory,
        ),
        trainable=actor_trainable,
        settings=config.actor,
        policy_loss=POLICY_LOSSES[config.actor.policy_loss](config.actor),
    )
    critic = None
    if config.uses_critic:
        critic_net = network("critic", "value", config.critic.memory.recompute, config.critic.lora)
        critic = Critic(
            network=critic_net,
            trainable=trainable("critic", critic_net, config.critic),
            settings=config.critic,
        )
    if not config.uses_reference:
        return actor, critic, None
    if config.actor.lora.rank and paths["reference"] == paths["actor"]:
        return actor, critic, replace(actor.policy, without_adapters=True)
    net = network("reference", "lm", "none")
    for chunk in net.chunks:
        chunk.requires_grad_(False)
    parts = chosen_parts(params=config.reference.param_offload, grads=False, optimizer=False)
    memory = Offloader("reference", net.chunks, parts=parts)
    memory.offload()
    return (
        actor,
        critic,
        Policy(network=net, chunks=net.chunks, temperature=temperature, memory=memory),
    )
