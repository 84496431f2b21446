"""Puts a run on given answers together."""

from __future__ import annotations

from dataclasses import replace

from megappo.config import SupervisedConfig
from megappo.config.guard import (
    SUPERVISED_UPDATE_METRICS,
    UPDATE_METRICS_OF,
    GuardRule,
    GuardSection,
)
from megappo.distributed.grad_sync import make_trainable
from megappo.distributed.parallel import ParallelContext
from megappo.models.spec import ModelSpec
from megappo.roles.learner import Learner
from megappo.roles.objectives import Objective
from megappo.trainer.build import build_network
from megappo.trainer.guard import Guard
from megappo.trainer.micro_batches import MicroBatchPlanner
from megappo.trainer.supervised.preflight import Course, SupervisedPreflight
from megappo.trainer.supervised.trainer import SupervisedTrainer
from megappo.trainer.utilization import Utilization, peak_flops_per_s


def build_supervised(
    config: SupervisedConfig,
    found: SupervisedPreflight,
    course: Course,
    context: ParallelContext,
) -> SupervisedTrainer:
    """Model, optimizer and loop state. Collective over the world; takes a while."""
    learner = build_learner(
        config, found.spec, found.objective, context, total_optimizer_steps=course.total_steps
    )
    return SupervisedTrainer(
        context=context,
        train_set=found.train_set,
        val_set=found.val_set,
        sampler=course.sampler,
        learner=learner,
        planner=MicroBatchPlanner.of(
            config.training,
            context=context,
            alignment=learner.network.alignment,
            mini_batch=found.plan.batch_per_dp_rank,
        ),
        guard=Guard(
            settings=GuardSection(rules=rules_of(config), max_actions=config.guard.max_actions),
            comparable=False,
        ),
        utilization=Utilization(
            specs={learner.objective.name: found.spec},
            peak_flops_per_s=peak_flops_per_s(config, context.device),
        ),
    )


def rules_of(config: SupervisedConfig) -> dict[str, GuardRule]:
    """The guard's rules; those that watch the updates of both tasks keep their own task's."""
    both, own = list(SUPERVISED_UPDATE_METRICS), list(UPDATE_METRICS_OF[config.task])
    return {
        name: replace(rule, metrics=own) if rule.metrics == both else rule
        for name, rule in config.guard.rules.items()
    }


def build_learner(
    config: SupervisedConfig,
    spec: ModelSpec,
    objective: Objective,
    context: ParallelContext,
    *,
    total_optimizer_steps: int,
) -> Learner:
    """The model with its optimizer. Collective over the world."""
    training = config.training
    network = build_network(
        config,
        spec,
        config.model.path,
        objective.head,
        context,
        recompute=training.recompute,
    )
    trainable = make_trainable(
        objective.name,
        network.chunks,
        network.config,
        optim=training.optim,
        total_optimizer_steps=total_optimizer_steps,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        overlap_param_gather=config.parallel.overlap_param_gather,
        fsdp=config.parallel.fsdp,
    )
    return Learner(network=network, trainable=trainable, objective=objective, settings=training)
