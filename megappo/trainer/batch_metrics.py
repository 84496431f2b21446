"""What a step's samples look like, as sums that are reduced over ranks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megappo.distributed.metrics import Tally
from megappo.ppo.corrections import effective_share, mismatch
from megappo.types import RolloutBatch

MISMATCH = {
    "diff": "rollout/log_prob_diff_mean",
    "k3": "rollout/k3_kl",
    "share": "rollout/log_prob_diff_over_0.1",
    "token_weight": "rollout/token_weight",
    "token_weight_sq": "rollout/token_weight_sq",
    "sequence_weight": "rollout/sequence_weight",
    "sequence_weight_sq": "rollout/sequence_weight_sq",
}
"""Figures of `ppo.corrections.Mismatch`, and the means they are reduced as; `finish` turns those of
weights into effective sample sizes."""

MEANS = (
    *MISMATCH.values(),
    "critic/score/mean",
    "critic/rewards/mean",
    "critic/advantages/mean",
    "actor/entropy",
    "response_length/mean",
    "response_length/clip_ratio",
    "prompt_length/mean",
)
CRITIC_MEANS = ("critic/returns/mean", "critic/values/mean")
"""Where there is a critic. Scores, rewards and advantages have verl's names without one too."""
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
    mask = batch.response_mask
    assert batch.scores is not None
    scores = batch.scores[batch.is_scored]
    assert batch.rewards is not None
    count, tokens = len(batch), int(mask.sum())
    tally.add("critic/score/mean", scores.sum().item(), len(scores))
    tally.add("critic/rewards/mean", batch.rewards.sum().item(), len(scores))
    for name, values in (
        ("critic/advantages/mean", batch.advantages),
        ("critic/returns/mean", batch.returns),
        ("critic/values/mean", batch.values),
        ("actor/entropy", entropy),
    ):
        if values is None:  # without a critic
            continue
        tally.add(name, values[mask].double().sum().item(), tokens)
    cut = sum(c.finish_reason == "length" for c in batch.completions)
    tally.add("response_length/mean", sum(batch.response_lengths), count)
    tally.add("response_length/clip_ratio", cut, count)
    tally.add("prompt_length/mean", sum(len(p.token_ids) for p in batch.prompts), count)
    if len(scores):
        tally.add_max("critic/score/max", scores.max().item())
        tally.add_max("critic/score/neg_min", -scores.min().item())
    if count:
        tally.add_max("response_length/max", max(batch.response_lengths))


def add_mismatch(tally: Tally, sampled: RolloutBatch) -> None:
    """Adds how far engine and trainer are apart on one rank's samples; see `add_batch`.

    Args:
        tally: of this rank.
        sampled: with old_log_probs, and with the mask of everything that was sampled: what a
            correction rejects must not vanish from the figures that it is judged by.
    """
    assert sampled.old_log_probs is not None
    found = mismatch(sampled.old_log_probs, sampled.rollout_log_probs, sampled.response_mask)
    for name, (total, count) in found.means.items():
        tally.add(MISMATCH[name], total, count)
    tally.add_max("rollout/log_prob_diff_max", found.diff_max)


def finish(reduced: Mapping[str, float]) -> dict[str, float]:
    """Metrics from reduced means and maxima: a minimum, and the effective sample sizes."""
    found = dict(reduced)
    if "critic/score/neg_min" in found:  # not if every reward failed
        found["critic/score/min"] = -found.pop("critic/score/neg_min")
    for level in ("token", "sequence"):
        mean, square = found.pop(f"rollout/{level}_weight"), found.pop(f"rollout/{level}_weight_sq")
        found[f"rollout/eff_sample_size_{level}"] = effective_share(mean, square)
    return found
