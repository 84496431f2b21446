"""Causal attention over packed sequences by PyTorch's kernel, for Megatron's local layer spec.

Legend: S tokens of all sequences, L one sequence, h query heads and g key heads on this rank, d
head dim. Megatron's local attention knows no packing. Here each sequence attends to itself alone,
so the cost is the sum of L^2, and sequences of similar length share one call. RoPE has been applied
before. Left out: context parallelism, dropout (always off), and arbitrary masks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megappo.errors import ModelError

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig

MIN_FILL = 0.85
"""Share of a padded call that must be real: L^2 summed over the group / (count x longest^2)."""


class PackedCausalAttention(torch.nn.Module):  # type: ignore[misc]
    """Core attention as Megatron's layer spec wants it, without parameters.

    Args:
        config: Read for dropout and context parallelism, both of which must be off.
        softmax_scale: Factor on query-key products; None for 1 / sqrt(d).
        unused: What Megatron passes to every core attention.

    Raises:
        ModelError: context parallelism is on.
    """

    def __init__(
        self,
        *,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        if config.context_parallel_size != 1:
            raise ModelError(
                "packed attention on this backend has no context parallelism, but "
                f"context_parallel_size is {config.context_parallel_size}; set it to 1"
            )
        assert config.attention_dropout == 0.0, "dropout is off in PPO"
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> Tensor:
        """Attends causally.

        Args:
            query: [S, h, d] packed, or [L, B, h, d] with B sequences of equal length.
            key: As `query`, with g heads.
            value: As `key`.
            attention_mask: Must be None; the mask is causal.
            packed_seq_params: Where each sequence starts; None for the unpacked shape.
            unused: Mask type and bias, which Megatron passes to every core attention.

        Returns:
            [S, h d] or [L, B, h d].
        """
        assert attention_mask is None, "only the causal mask is supported"
        if packed_seq_params is None:
            batched = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._attend(*batched).permute(2, 0, 1, 3).flatten(2)
        starts = packed_seq_params.cu_seqlens_q.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        outputs, order = [], []
        for group in group_by_length(lengths):
            rows, inside = _gather_rows(group, starts, lengths, query.device)
            padded = (x[rows].transpose(1, 2) for x in (query, key, value))
            outputs.append(self._attend(*padded).transpose(1, 2)[inside])
            order.append(rows[inside])
        back = torch.empty_like(torch.cat(order))
        back[torch.cat(order)] = torch.arange(len(back), device=back.device)
        return torch.cat(outputs)[back].flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[n, heads, L, d] each; right padding is harmless because the mask is causal."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Splits sequences into groups that are padded to one length each, with little waste.

    Args:
        lengths: Tokens of each sequence, all positive.

    Returns:
        Indices into `lengths`; each sequence is in one group, and no group is filled to less than
        `MIN_FILL`.
    """
    groups: list[list[int]] = []
    useful = 0
    for i in sorted(range(len(lengths)), key=lambda j: -lengths[j]):
        useful += lengths[i] ** 2
        if groups and useful >= MIN_FILL * (len(groups[-1]) + 1) * lengths[groups[-1][0]] ** 2:
            groups[-1].append(i)
        else:
            groups.append([i])
            useful = lengths[i] ** 2
    return groups


def _gather_rows(
    group: list[int], starts: list[int], lengths: list[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Rows [n, L] of the packed tensor for a group, and which of them are real, [n, L] bool."""
    first = torch.tensor([starts[i] for i in group], device=device)[:, None]
    length = torch.tensor([lengths[i] for i in group], device=device)[:, None]
    offset = torch.arange(max(lengths[i] for i in group), device=device)[None, :]
    # Padding repeats the last token of its sequence: any real row will do, it is dropped again.
    return first + torch.minimum(offset, length - 1), offset < length
