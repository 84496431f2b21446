"""Megatron's mixture-of-experts layer, with a balance loss that no layout changes.

Legend: E experts, of which each token takes k; T tokens of one sequence; n tokens on this rank, of
all its sequences; S positions of a row, B rows, H hidden size.

The loss is DeepSeek-V3's sequence-wise one (arXiv 2412.19437, eq. 17-20, without its coefficient):

    L = E / (k T) sum_i count_i * 1/T sum_t p_ti

for each real sequence, with count_i its tokens that chose expert i and p the router's scores, which
add up to 1 over all experts (a softmax, or sigmoids divided by their sum). It belongs to a sequence
and not to a micro-batch or a rank, so a sum over sequences is the same for every split. Where a
sequence is spread over ranks the counts, which have no gradient, are added up over them, and each
rank's part of the loss is the sum over its own tokens. Router weights are reduced over TP (marked
as sequence-parallel), CP and DP, so each part counts once.

Megatron is imported at the top: import this module after `cpu_backend.install`, inside functions.
Megatron's own routing takes softmax scores without groups; `routing` has the other rules.
Left out: CUDA graphs, shared experts beside the all-to-all, and what `moe` lists.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megappo.models.parts import RouterRule
from megappo.models.routing import choose_experts, expert_scores
from megappo.models.spec import ModelSpec


class BalancedRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's router, which adds the balance loss where gradients are taken.

    Args:
        config: Megatron's TransformerConfig.
        pg_collection: Process groups.
        rule: How it scores and chooses.
        normalized: Whether the weights of a token's experts are divided by their sum.
    """

    def __init__(
        self, config: Any, pg_collection: Any = None, *, rule: RouterRule, normalized: bool
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.rule = rule
        self.normalized = normalized
        if rule.has_bias:
            # Megatron's own switch for it would also move it after every step.
            del self.expert_bias
            bias = torch.zeros(self.num_experts, device=self.weight.device)
            self.register_buffer("expert_bias", bias)
        self.aux_scale = 0.0
        """Factor on the gradient of each sequence's loss; 0 leaves gradients as they are."""
        self.aux_loss = torch.zeros((), device=self.weight.device)
        """Sum of this rank's parts since it was last read, float32, without `aux_scale`."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights [n, E] of the chosen experts, and which they are, [n, E] bool.

        Collective over the TP x CP ranks where gradients are taken.

        Args:
            logits: [S, B, E]
            padding_mask: [S, B] int, sequence numbers from 1, 0 for padding; needed in training.
        """
        weights, chosen = self._choose(logits)
        if not torch.is_grad_enabled() or (padding_mask is None and self.aux_scale == 0.0):
            return weights, chosen
        assert padding_mask is not None, "the balance loss needs the numbers of the sequences"
        part = balance_loss(
            logits.reshape(-1, logits.shape[-1]),
            chosen,
            padding_mask.reshape(-1).long(),
            experts_per_token=self.topk,
            score=self.rule.score,
            group=self.tp_cp_group,
        )
        self.aux_loss = self.aux_loss.to(part.device) + part.detach()
        if self.aux_scale == 0.0:  # measured all the same: without the loss a router may collapse
            return weights, chosen
        return MoEAuxLossAutoScaler.apply(weights, self.aux_scale * part), chosen

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self.rule.score == "softmax" and self.rule.num_groups == 1:
            weights, chosen = super().routing(logits)
            return weights, chosen
        return choose_experts(
            logits.reshape(-1, logits.shape[-1]),
            self.expert_bias,
            experts_per_token=self.topk,
            rule=self.rule,
            normalized=self.normalized,
        )


def balance_loss(
    logits: Tensor,
    chosen: Tensor,
    segments: Tensor,
    *,
    experts_per_token: int,
    score: str,
    group: Any,
) -> Tensor:
    """This rank's part of the balance loss, summed over sequences. Collective over `group`.

    Args:
        logits: [n, E]
        chosen: [n, E] bool
        segments: [n] int64, number of each token's sequence from 1, 0 for padding.
        experts_per_token: k
        score: What the router scores with: `softmax` or `sigmoid`.
        group: Ranks over which sequences are spread.

    Returns:
        0-dim float32, differentiable in `logits`.
    """
    num_experts = logits.shape[1]
    largest = segments.max()
    if group.size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    ones = torch.ones_like(segments, dtype=torch.float32)[:, None]
    counts = ones.new_zeros(int(largest) + 1, num_experts + 1)
    counts.index_add_(0, segments, torch.cat([chosen.float(), ones], dim=1))
    if group.size() > 1:
        dist.all_reduce(counts, group=group)
    lengths = counts[:, -1:].clamp(min=1.0)
    factors = num_experts / experts_per_token * counts[:, :-1] / lengths.square()
    factors[0] = 0.0
    scores = expert_scores(logits, score)
    return (factors[segments] * scores / scores.sum(dim=-1, keepdim=True)).sum()


class PackedMoELayer(MoELayer):  # type: ignore[misc]
    """Megatron's layer with sequence numbers in place of a padding mask, which it makes bool."""

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: None = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Routes, sends, computes and brings back. Collective over the EP and ETP ranks.

        Args:
            hidden_states: [S, B, H]
            intermediate_tensors: Must be None; of CUDA graphs.
            padding_mask: [B, S] int, sequence numbers; see `moe.router_segments`.

        Returns:
            [S, B, H], and no bias.
        """
        assert intermediate_tensors is None, "CUDA graphs are not offered"
        segments = None if padding_mask is None else padding_mask.transpose(0, 1)
        if self.moe_layer_recompute:
            output = tensor_parallel.checkpoint(self._compute, False, hidden_states, segments)
        else:
            output = self._compute(hidden_states, segments)
        return output, None

    def _compute(self, hidden_states: Tensor, segments: Tensor | None) -> Tensor:
        shared = self.shared_experts_compute(hidden_states)
        weights, chosen = self.route(hidden_states, segments)
        hidden_states, weights = self.preprocess(hidden_states, weights, chosen)
        received, weights = self.dispatch(hidden_states, weights)
        output, _ = self.routed_experts_compute(received, weights)
        result: Tensor = self.postprocess(self.combine(output), shared)
        return result


def use_packed_moe(layer: ModuleSpec, spec: ModelSpec) -> None:
    """Puts our layer and router in place of Megatron's in a layer's spec; dense ones stay.

    The class is bound to its submodules because TransformerLayer warns about a ModuleSpec of a
    class that it does not know (transformer_layer.py:367).
    """
    mlp = layer.submodules.mlp
    if not isinstance(mlp, ModuleSpec) or mlp.module is not MoELayer:
        return
    router = partial(BalancedRouter, rule=spec.router, normalized=spec.norm_topk_prob)
    submodules = replace(mlp.submodules, router=router)
    if not spec.shared_ffn_hidden_size:
        submodules = replace(submodules, shared_experts=None)

    class BoundMoELayer(PackedMoELayer):
        def __init__(self, config: Any, **unused: Any) -> None:
            super().__init__(config, submodules)

    layer.submodules.mlp = BoundMoELayer
    # The local spec would save the norm before the experts under the name that it has when it is
    # part of the MLP; Transformer Engine's, whose names checkpoints have, leaves it alone here.
    layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
