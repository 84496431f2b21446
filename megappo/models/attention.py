"""Causal attention by PyTorch's kernel, for Megatron's local layer spec: packed, padded, and CP.

Legend: S positions of the whole layout, L one sequence, CP context-parallel ranks, h query heads
and g key heads on this rank, d head dim. Megatron's local attention knows no packing and no context
parallelism. Here each packed sequence attends to itself alone, so the cost is the sum of L^2, and
sequences of similar length share one call. Under CP each rank has a zigzag share of every sequence:
keys and values of all ranks are gathered (gradients scattered back), queries stay. RoPE has been
applied before. Left out: dropout (always off), and masks other than the causal one. On CUDA
Transformer Engine's attention takes this place.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megappo.distributed.context_parallel import context_group, gather_rows, zigzag

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig

MIN_FILL = 0.85
"""Share of a padded call that must be real: L^2 summed over the group / (count x longest^2)."""


class PackedCausalAttention(torch.nn.Module):  # type: ignore[misc]
    """Core attention as Megatron's layer spec wants it, without parameters.

    Args:
        config: Read for dropout, which must be off, and for context parallelism.
        softmax_scale: Factor on query-key products; None for 1 / sqrt(d).
        unused: What Megatron passes to every core attention.
    """

    def __init__(
        self,
        *,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        assert config.attention_dropout == 0.0, "dropout is off in PPO"
        self.softmax_scale = softmax_scale
        self.cp: int = config.context_parallel_size

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
        """Attends causally. Collective over the CP group.

        Args:
            query: [S / CP, h, d] packed, or [L / CP, B, h, d] with B sequences of equal length.
            key: As `query`, with g heads.
            value: As `key`.
            attention_mask: Must be None; the mask is causal.
            packed_seq_params: Where each sequence of the whole layout starts; None for the unpacked
                shape.
            unused: Mask type and bias, which Megatron passes to every core attention.

        Returns:
            [S / CP, h d] or [L / CP, B, h d].
        """
        assert attention_mask is None, "only the causal mask is supported"
        if packed_seq_params is None:
            return self._forward_padded(query, key, value)
        starts = packed_seq_params.cu_seqlens_q.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        rows = _KeyRows(lengths, self.cp)
        key, value = rows.gather(key), rows.gather(value)
        outputs, order = [], []
        for group in group_by_length(lengths):
            mine, q_inside = _gather_rows(group, starts, lengths, self.cp)
            keys, _ = _gather_rows(group, starts, lengths, 1)
            q_rows, k_rows = mine.to(query.device), rows.index_of[keys].to(query.device)
            out = self._attend(
                query[q_rows].transpose(1, 2),
                key[k_rows].transpose(1, 2),
                value[k_rows].transpose(1, 2),
                self._mask(max(lengths[i] for i in group), group, lengths, query.device),
            )
            inside = q_inside.to(query.device)
            outputs.append(out.transpose(1, 2)[inside])
            order.append(q_rows[inside])
        back = torch.empty_like(torch.cat(order))
        back[torch.cat(order)] = torch.arange(len(back), device=back.device)
        return torch.cat(outputs)[back].flatten(1)

    def _forward_padded(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = len(query) * self.cp
        rows = _KeyRows([length], self.cp)
        in_order = rows.index_of.to(query.device)
        key, value = rows.gather(key)[in_order], rows.gather(value)[in_order]
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mask = self._mask(length, [0], [length], query.device)
        return self._attend(query, key, value, mask).permute(2, 0, 1, 3).flatten(2)

    def _mask(
        self, longest: int, group: list[int], lengths: list[int], device: torch.device
    ) -> Tensor | None:
        """[n, 1, longest / CP, longest] bool of what each local query sees; None without CP."""
        if self.cp == 1:
            return None
        rank, keys = context_group().rank(), torch.arange(longest)
        masks = []
        for i in group:
            positions = zigzag([lengths[i]], self.cp, rank)
            # Padding repeats the last query, as `_gather_rows` does.
            missing = longest // self.cp - len(positions)
            positions = torch.cat([positions, positions[-1:].expand(missing)])
            masks.append(positions[:, None] >= keys[None, :])
        return torch.stack(masks)[:, None].to(device)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """[n, heads, L, d] each; right padding is harmless because the mask is causal."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )


class _KeyRows:
    """Keys of all CP ranks, and where the gathered rows hold a position of the whole layout."""

    def __init__(self, lengths: list[int], cp: int) -> None:
        self.cp = cp
        held = torch.cat([zigzag(lengths, cp, rank) for rank in range(cp)])
        self.index_of = torch.empty_like(held)
        self.index_of[held] = torch.arange(len(held))

    def gather(self, rows: Tensor) -> Tensor:
        return rows if self.cp == 1 else gather_rows(rows, context_group())


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
    group: list[int], starts: list[int], lengths: list[int], cp: int
) -> tuple[Tensor, Tensor]:
    """Rows [n, L / CP] for a group in a layout split over `cp` ranks, and which of them are real.

    Each rank holds 1 / CP of every sequence, in the order of sequences.
    """
    first = torch.tensor([starts[i] // cp for i in group])[:, None]
    length = torch.tensor([lengths[i] // cp for i in group])[:, None]
    offset = torch.arange(int(length.max()))[None, :]
    # Padding repeats the last token of its sequence: any real row will do, it is dropped again.
    return first + torch.minimum(offset, length - 1), offset < length
