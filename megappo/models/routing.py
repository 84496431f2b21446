"""Which experts a token takes, with what weights, by rules of families that Megatron has not.

Legend: n tokens, E experts, of which each token takes k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.models.parts import RouterRule


def choose_experts(
    logits: Tensor,
    bias: Tensor | None,
    *,
    experts_per_token: int,
    rule: RouterRule,
    normalized: bool,
) -> tuple[Tensor, Tensor]:
    """Scores experts and chooses some within a token's best groups.

    As in DeepSeek-V2 (arXiv 2405.04434, section 2.2.2: a group counts by its best score) and V3
    (arXiv 2412.19437, section 2.1.2: sigmoids, a bias in the choice alone, the sum of a group's two
    best). Megatron takes the best k / groups_per_token of a group, which is V3's rule only for
    V3's own numbers, and always normalises sigmoids.

    Args:
        logits: [n, E]
        bias: [E] float32, or None.
        experts_per_token: k
        rule: Scores, groups and scale.
        normalized: Divide the weights of the chosen by their sum.

    Returns:
        Weights [n, E], 0 for experts that were not chosen, and which were, [n, E] bool.
    """
    scores = expert_scores(logits, rule.score)
    with torch.no_grad():
        ranking = scores if bias is None else scores + bias
        groups = ranking.unflatten(1, (rule.num_groups, -1))
        of_group = groups.topk(rule.best_of_group, dim=-1).values.sum(dim=-1)
        best = of_group.topk(rule.groups_per_token, dim=-1).indices
        open_groups = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, best, True)
        closed = ~open_groups.repeat_interleave(groups.shape[-1], dim=1)
        picks = ranking.masked_fill(closed, -torch.inf).topk(experts_per_token, dim=-1).indices
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, picks, True)
    weights = scores.masked_fill(~chosen, 0.0)
    if normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return (weights * rule.scale).to(logits.dtype), chosen


def expert_scores(logits: Tensor, score: str) -> Tensor:
    """[n, E] float32, each between 0 and 1."""
    return logits.float().sigmoid() if score == "sigmoid" else logits.float().softmax(dim=-1)
