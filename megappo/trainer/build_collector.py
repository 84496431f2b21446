"""Puts together where a step's samples come from; a part of `build`."""

from __future__ import annotations

from megappo.config import Config
from megappo.data.curriculum import CurriculumSampler
from megappo.rollout.worker import RolloutWorker
from megappo.trainer.collect import Collector, DrawnSource, Finisher, GreedyFinisher, Source
from megappo.trainer.dynamic_sampling import DynamicSource
from megappo.trainer.group_metrics import GroupMetrics
from megappo.trainer.preflight import Preflight
from megappo.trainer.scoring import BatchScorer
from megappo.trainer.truncation import MaskCutFinisher, OverlongFinisher


def make_collector(
    config: Config, found: Preflight, rollouts: RolloutWorker, scorer: BatchScorer
) -> Collector:
    """The source of samples that the config asks for, and what is added to their scores."""
    drawn = DrawnSource(
        context=rollouts.context,
        dataset=found.train_set,
        sampler=found.sampler,
        rollouts=rollouts,
        scorer=scorer,
        mini_batch_prompts=config.actor.mini_batch_size,
        sources=found.train_sources,
        curriculum=found.sampler if isinstance(found.sampler, CurriculumSampler) else None,
    )
    return Collector(
        source=_source(config, drawn),
        scorer=scorer,
        finishers=_finishers(config, rollouts, scorer),
        groups=GroupMetrics(
            n=config.rollout.n,
            sources=found.train_sources,
            reports=rollouts.context.reports_samples,
        ),
    )


def _source(config: Config, drawn: DrawnSource) -> Source:
    if not config.algorithm.filter_groups:
        return drawn
    return DynamicSource(
        drawn=drawn,
        n=config.rollout.n,
        max_rounds=config.algorithm.max_sampling_rounds,
        ignores_cut=config.algorithm.mask_truncated,
    )


def _finishers(config: Config, rollouts: RolloutWorker, scorer: BatchScorer) -> list[Finisher]:
    shape = None
    if config.reward.overlong_buffer:
        shape = OverlongFinisher(
            max_length=config.rollout.max_response_length,
            buffer=config.reward.overlong_buffer,
            factor=config.reward.overlong_penalty_factor,
            reports=rollouts.context.reports_samples,
        )
    found: list[Finisher] = [] if shape is None else [shape]
    if config.algorithm.traits.uses_greedy_baseline:
        found.append(GreedyFinisher(rollouts=rollouts, scorer=scorer, shape=shape))
    if config.algorithm.mask_truncated:
        found.append(MaskCutFinisher())
    return found
