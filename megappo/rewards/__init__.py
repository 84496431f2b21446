"""Rewards, chosen per row by the `data_source` column of the data.

`REWARDS` binds a name to a factory. A data_source is itself such a name, or `reward.sources` says
which rewards are summed for it; `resolve` turns the data_sources of a data set into rewards before
anything expensive starts. To add a reward, write one file with its function and one registration
here. Reward models are no rule on text: they live in `megappo.roles`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megappo.config.rewards import RewardSection
from megappo.errors import DataError, UserError
from megappo.registry import Registry, did_you_mean
from megappo.rewards.base import Reward, RewardFactory, RewardFunction

REWARDS: Registry[RewardFactory] = Registry("reward")


@dataclass(frozen=True, kw_only=True)
class Term:
    """One term of a data_source's weighted sum."""

    label: str
    weight: float
    reward: Reward


@REWARDS.register("arithmetic")
@REWARDS.register("gsm8k")
def _gsm8k(settings: RewardSection) -> RewardFunction:
    from megappo.rewards import gsm8k

    method = settings.gsm8k_method
    gsm8k.check_method(method)

    def reward(response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        return gsm8k.score(response, ground_truth, method=method)

    return reward


@REWARDS.register("math")
def _math(settings: RewardSection) -> RewardFunction:
    from megappo.rewards import math
    from megappo.rewards.math_pool import MathVerifier

    if importlib.util.find_spec("math_verify") is None:
        raise UserError(
            "the reward 'math' compares answers with the package math-verify, which is not "
            "installed: pip install math-verify"
        )
    verifier = MathVerifier(timeout_s=math.TIMEOUT_S)

    def reward(response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        return math.check(response, ground_truth, verifier=verifier)

    return reward


MODEL_ONLY = "reward_model"
"""The data_source of rows that no rule scores: a reward model does, and `preflight` wants one."""


@REWARDS.register(MODEL_ONLY)
def _model_only(settings: RewardSection) -> RewardFunction:
    def reward(response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        return 0.0

    return reward


@REWARDS.register("exact_match")
def _exact_match(settings: RewardSection) -> RewardFunction:
    from megappo.rewards import exact_match

    def reward(response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        return exact_match.score(response, ground_truth)

    return reward


@REWARDS.register("length")
def _length(settings: RewardSection) -> RewardFunction:
    from megappo.rewards import length

    return length.make(settings.length)


@REWARDS.register("format")
def _format(settings: RewardSection) -> RewardFunction:
    from megappo.rewards import format

    return format.make(settings.format)


@REWARDS.register("code")
def _code(settings: RewardSection) -> RewardFunction:
    from megappo.rewards import code

    return code.make(settings.code, num_workers=settings.num_threads)


@REWARDS.register("remote")
def _remote(settings: RewardSection) -> Reward:
    from megappo.rewards import remote

    return remote.RemoteReward(settings.remote)


@REWARDS.register("custom")
def _custom(settings: RewardSection) -> Reward:
    from megappo.rewards import custom

    return custom.make(settings.custom, num_workers=settings.num_threads)


def resolve(
    data_sources: Iterable[str],
    settings: RewardSection,
    *,
    registry: Registry[RewardFactory] = REWARDS,
) -> dict[str, tuple[Term, ...]]:
    """The rewards of each distinct data_source; call it at start, before models are loaded.

    Args:
        data_sources: Values of the `data_source` column; repeats are fine.
        settings: Say which rewards stand for them.
        registry: Where their names are looked up.

    Raises:
        DataError: If a data_source is empty or stands for no known reward; all are named at once.
        UserError: If a reward lacks a package or a setting.
    """
    wanted = {source: settings.parts(source) for source in sorted(set(map(str, data_sources)))}
    unknown = {s: p.name for s, parts in wanted.items() for p in parts if p.name not in registry}
    if unknown:
        named = [s if s == name else f"{s} (reward {name!r})" for s, name in unknown.items()]
        raise DataError(
            "every row's data_source must name a reward, or stand in reward.sources, but the data "
            f"has {', '.join(repr(text) for text in named)}"
            f"{did_you_mean(next(iter(unknown.values())), registry)}. "
            "Name its rewards in reward.sources, or correct the data_source column"
        )
    built: dict[str, Reward] = {}
    terms: dict[str, tuple[Term, ...]] = {}
    for source, parts in wanted.items():
        for part in parts:
            # The same reward with the same settings is built once: it may hold processes.
            key = repr((part.name, part.settings))
            if key not in built:
                built[key] = registry[part.name](part.settings)
        terms[source] = tuple(
            Term(label=p.label, weight=p.weight, reward=built[repr((p.name, p.settings))])
            for p in parts
        )
    return terms
