"""Rule-based rewards, chosen per row by the `data_source` column of the data.

`REWARDS` binds a data_source to a factory, and `resolve` turns the data_sources of a data set into
reward functions before anything expensive starts. To add a reward, write one file with its function
and one registration here. Reward models are no rule on text: they live in `megappo.roles`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

from megappo.errors import DataError, UserError
from megappo.registry import Registry, did_you_mean
from megappo.rewards.base import RewardFactory, RewardFunction

REWARDS: Registry[RewardFactory] = Registry("data_source")


@REWARDS.register("gsm8k")
def _gsm8k(*, method: str) -> RewardFunction:
    from megappo.rewards import gsm8k

    gsm8k.check_method(method)

    def reward(response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        return gsm8k.score(response, ground_truth, method=method)

    return reward


@REWARDS.register("arithmetic")
def _arithmetic(*, method: str) -> RewardFunction:
    return _gsm8k(method=method)


@REWARDS.register("math")
def _math(*, method: str) -> RewardFunction:
    from megappo.rewards import math
    from megappo.rewards.math_pool import MathVerifier

    if importlib.util.find_spec("math_verify") is None:
        raise UserError(
            "data_source 'math' compares answers with the package math-verify, which is not "
            "installed: pip install math-verify"
        )
    verifier = MathVerifier(timeout_s=math.TIMEOUT_S)

    def reward(response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        return math.check(response, ground_truth, verifier=verifier)

    return reward


@REWARDS.register("exact_match")
def _exact_match(*, method: str) -> RewardFunction:
    from megappo.rewards import exact_match

    def reward(response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        return exact_match.score(response, ground_truth)

    return reward


def resolve(
    data_sources: Iterable[str],
    *,
    method: str = "strict",
    registry: Registry[RewardFactory] = REWARDS,
) -> dict[str, RewardFunction]:
    """The reward function of each distinct data_source; call it at start, before models are loaded.

    Args:
        data_sources: Values of the `data_source` column; repeats are fine.
        method: How rewards that offer a choice find the answer, see `megappo.rewards.gsm8k`.
        registry: Where the names are looked up.

    Raises:
        DataError: If a data_source is empty or unknown; all such values are named at once.
        UserError: If a reward lacks a package, or `method` is unknown to it.
    """
    wanted = sorted({str(source) for source in data_sources})
    unknown = [source for source in wanted if source not in registry]
    if unknown:
        raise DataError(
            "every row's data_source must name a reward, but the data has "
            f"{', '.join(repr(source) for source in unknown)}{did_you_mean(unknown[0], registry)}. "
            "Correct the data_source column, or register a reward in megappo/rewards/__init__.py"
        )
    return {source: registry[source](method=method) for source in wanted}
