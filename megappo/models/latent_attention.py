"""Multi-head latent attention in Megatron's local layers: what they lack for TP and checkpoints.

Transformer Engine's layers hold the projections to small vectors whole on every TP rank. The local
ones split them, gather their output and give each rank the gradient of its own heads alone for the
rotated key that all heads share; so here they are whole too. Megatron is imported inside.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megappo.models.name_map import LATENT_NORMS

_DOWN = ("linear_q_down_proj", "linear_kv_down_proj")


class WholeLinear(torch.nn.Module):  # type: ignore[misc]
    """A product without bias whose weight every TP rank holds.

    Args:
        rows: Size of the output.
        columns: Size of the input.
        config: Megatron's TransformerConfig. Under sequence parallelism each TP rank takes its
            share of the tokens, and the gradients are summed over TP as those of norms are.
    """

    def __init__(self, rows: int, columns: int, config: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(rows, columns, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """[.., columns] -> [.., rows], and no bias."""
        return F.linear(hidden, self.weight), None


def use_whole_projections(chunk: Any) -> None:
    """Puts `WholeLinear` in place of the split projections to small vectors of all layers."""
    config = chunk.config
    ranks = {
        "linear_q_down_proj": config.q_lora_rank,
        "linear_kv_down_proj": config.kv_lora_rank + config.qk_pos_emb_head_dim,
    }
    for layer in chunk.decoder.layers:
        attention = layer.self_attention
        for name in _DOWN:
            if ranks[name] is not None:
                setattr(attention, name, WholeLinear(ranks[name], config.hidden_size, config))


def name_norms_in_checkpoints(layer: Any, *, dense: bool) -> None:
    """Makes a local layer's spec save norms under the names that Transformer Engine's has.

    Args:
        layer: The spec, which several layers may share.
        dense: Whether it has an MLP; the norm before experts stands alone in both.
    """
    names = LATENT_NORMS | ({"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"} if dense else {})
    layer.submodules.sharded_state_dict_keys_map |= names
