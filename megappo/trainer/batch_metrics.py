"""What a step's samples look like, as sums that are reduced over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.distributed.metrics import Tally
from megappo.types import RolloutBatch

MEANS = (
    "critic/score/mean",
    "critic/rewards/mean",
    "critic/advantages/mean",
    "critic/returns/mean",
    "critic/values/mean",
    "actor/entropy",
    "response_length/mean",
    "response_length/clip_ratio",
    "prompt_length/mean",
    "rollout/log_prob_diff_mean",
)
MAXIMA = (
    "critic/score/max",
    "critic/score/neg_min",
    "response_length/max",
    "rollout/log_prob_diff_max",
)


def add_batch(tally: Tally, batch: RolloutBatch, entropy: Tensor) -> None:
    """Adds one rank's samples; only one rank of each replica may call it.

    Args:
        tally: of this rank.
        batch: with every field filled.
        entropy: [B, T], of the actor before the update.
    """
    mask, scores = batch.response_mask, batch.scores
    assert scores is not None
    assert batch.rewards is not None
    assert batch.old_log_probs is not None
    count, tokens = len(batch), int(mask.sum())
    tally.add("critic/score/mean", scores.sum().item(), count)
    tally.add("critic/rewards/mean", batch.rewards.sum().item(), count)
    for name, values in (
        ("critic/advantages/mean", batch.advantages),
        ("critic/returns/mean", batch.returns),
        ("critic/values/mean", batch.values),
        ("actor/entropy", entropy),
    ):
        assert values is not None
        tally.add(name, values[mask].double().sum().item(), tokens)
    cut = sum(c.finish_reason == "length" for c in batch.completions)
    tally.add("response_length/mean", sum(batch.response_lengths), count)
    tally.add("response_length/clip_ratio", cut, count)
    tally.add("prompt_length/mean", sum(len(p.token_ids) for p in batch.prompts), count)
    diff = (batch.rollout_log_probs - batch.old_log_probs)[mask].abs().double()
    tally.add("rollout/log_prob_diff_mean", diff.sum().item(), tokens)
    if count:
        tally.add_max("critic/score/max", scores.max().item())
        tally.add_max("critic/score/neg_min", -scores.min().item())
        tally.add_max("response_length/max", max(batch.response_lengths))
    if tokens:
        tally.add_max("rollout/log_prob_diff_max", _nan_is_largest(diff).item())


def _nan_is_largest(x: Tensor) -> Tensor:
    """Maximum that shows a NaN as infinity instead of hiding it."""
    return torch.nan_to_num(x, nan=float("inf")).max()
