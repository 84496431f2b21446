"""A Megatron model with what every role needs: packed forward passes over a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megappo.distributed.parallel import ParallelContext
from megappo.distributed.pipeline import broadcast_from_last_stage, run_forward
from megappo.models.packing import packed_seq_params
from megappo.models.spec import ModelSpec
from megappo.roles.micro_batch import MicroBatch, cut
from megappo.types import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class Network:
    """This rank's part of one model, and how to call it."""

    spec: ModelSpec
    config: Any
    """Megatron's TransformerConfig."""
    chunks: Sequence[torch.nn.Module]
    """Bare chunks; a trained role calls them through their DDP wrapper."""
    context: ParallelContext

    @property
    def multiple_of(self) -> int:
        """Packed lengths are a multiple of this: sequence parallel splits tokens over TP."""
        return self.context.tp if self.config.sequence_parallel else 1

    def cut(self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]]) -> list[MicroBatch]:
        """Micro-batches of a batch, packed on this rank's device."""
        return cut(batch, micro_batches, device=self.context.device, multiple_of=self.multiple_of)

    def fill(
        self,
        chunks: Sequence[torch.nn.Module],
        batch: RolloutBatch,
        micro_batches: Sequence[Sequence[int]],
        finish: Callable[[Tensor, MicroBatch], list[Tensor]],
        *,
        num_outputs: int,
    ) -> list[Tensor]:
        """Forward passes over a batch, every result brought back to [B, T] float32 on the CPU.

        Collective over the replica; equal on all of its ranks.

        Args:
            chunks: wrapped or bare, as the role calls them.
            batch: [B] samples.
            micro_batches: rows of each forward pass.
            finish: last stage's output -> `num_outputs` tensors [b, T].
            num_outputs: how many.
        """
        cuts = self.cut(batch, micro_batches)
        parts = run_forward(chunks, cuts, call=call_model, finish=finish, max_tokens=longest(cuts))
        filled = torch.zeros(
            (num_outputs, *batch.responses.shape), dtype=torch.float32, device=self.context.device
        )
        for micro, outputs in zip(cuts, parts, strict=False):  # no parts before the last stage
            rows = torch.tensor(micro.indices, dtype=torch.long, device=filled.device)
            filled[:, rows] = torch.stack(outputs)
        return list(broadcast_from_last_stage(filled).cpu())


def call_model(module: torch.nn.Module, micro: MicroBatch) -> Tensor:
    """One chunk's forward: hidden states, or at the end [1, S, V/TP] logits or [1, S] values."""
    packed = micro.packed
    output: Tensor = module(
        input_ids=packed.tokens,
        position_ids=packed.position_ids,
        attention_mask=None,
        packed_seq_params=packed_seq_params(packed),
    )
    return output


def longest(micro_batches: Sequence[MicroBatch]) -> int:
    """Most packed tokens of one forward pass."""
    return max(m.num_tokens for m in micro_batches)
