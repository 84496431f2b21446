"""A Megatron model with what every role needs: forward passes over a batch, brought to [B, T]."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megappo.distributed.context_parallel import sum_over_context
from megappo.distributed.grad_sync import Trainable
from megappo.distributed.metrics import Tally, reduce_mean
from megappo.distributed.parallel import ParallelContext, sum_over_data
from megappo.distributed.pipeline import broadcast_from_last_stage, run_forward
from megappo.models.moe import router_segments, set_aux_loss, take_aux_loss
from megappo.models.packing import Alignment, packed_seq_params, token_multiple
from megappo.models.spec import ModelSpec
from megappo.ppo.losses import local_denominator
from megappo.roles.micro_batch import MicroBatch, cut
from megappo.types import MiniBatch, RolloutBatch

GIB = 2.0**30

UpdateCheck = Callable[[Mapping[str, float]], bool]
"""Whether an update may write weights, from its gradient norm and loss over all ranks, by metric
name. It answers alike on every rank."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """This rank's part of one model, and how to call it."""

    spec: ModelSpec
    config: Any
    """Megatron's TransformerConfig."""
    chunks: Sequence[torch.nn.Module]
    """Bare chunks; a trained role calls them through their DDP wrapper."""
    context: ParallelContext
    packed: bool = True
    """Sequences end to end in one row; otherwise padded to the longest of a micro-batch."""

    @property
    def alignment(self) -> Alignment:
        """What this layout asks of lengths."""
        return Alignment(
            multiple_of=token_multiple(
                tp=self.context.tp,
                sequence_parallel=self.config.sequence_parallel,
                fp8_recipe=self.config.fp8_recipe if self.config.fp8 else None,
            ),
            cp=self.context.cp,
            cp_rank=self.context.cp_rank,
            packed=self.packed,
        )

    def cut(self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]]) -> list[MicroBatch]:
        """Micro-batches of a batch, laid out on this rank's device."""
        return cut(batch, micro_batches, device=self.context.device, alignment=self.alignment)

    def denominator(self, response_mask: Tensor, mode: str) -> Tensor:
        """This rank's part of a loss's denominator: each sample counts on one CP rank, 0-dim.

        Args:
            response_mask: [b, T] bool of whole samples.
            mode: of `aggregation_weights`.
        """
        counted = local_denominator(response_mask, mode).to(self.context.device)
        return counted if self.context.cp_rank == 0 else torch.zeros_like(counted)

    def balance_experts(
        self, mini: MiniBatch, *, coefficient: float, loss_agg_mode: str
    ) -> BalanceLoss | None:
        """Switches the experts' balance loss on for one mini-batch; None for a dense model.

        Collective over DP. The gradients of a mini-batch are divided by its main loss's denominator
        at the end, so the balance loss is scaled by it here to be a mean over sequences.

        Args:
            mini: this rank's samples of the mini-batch.
            coefficient: weight of the loss; 0 leaves gradients exactly as without.
            loss_agg_mode: of the main loss.
        """
        here = local_denominator(mini.samples.response_mask, loss_agg_mode).item()
        return self.balance_experts_by(here, len(mini.samples), coefficient=coefficient)

    def balance_experts_by(
        self, local_count: float, num_samples: int, *, coefficient: float
    ) -> BalanceLoss | None:
        """The same for a main loss whose denominator is known. Collective over DP.

        Args:
            local_count: this DP rank's part of the main loss's denominator.
            num_samples: sequences on this DP rank.
            coefficient: weight of the loss.
        """
        if not self.spec.num_experts:
            return None
        pair = torch.tensor([local_count, float(num_samples)], dtype=torch.float64)
        denominator, sequences = sum_over_data(pair, self.context).tolist()
        set_aux_loss(self.chunks, coefficient * denominator / sequences)
        return BalanceLoss(chunks=self.chunks, num_sequences=sequences)

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
        return list(broadcast_from_last_stage(sum_over_context(filled)).cpu())


@dataclass(frozen=True, kw_only=True)
class BalanceLoss:
    """A mini-batch's balance loss of the experts, as `Network.balance_experts` switched it on."""

    chunks: Sequence[torch.nn.Module]
    num_sequences: float
    """over all ranks"""

    def add_to(self, tally: Tally, name: str, context: ParallelContext) -> None:
        """Adds this rank's part: summed over ranks it is the mean over sequences, over layers."""
        once = 1.0 if context.rank == 0 else 0.0
        tally.add(name, take_aux_loss(self.chunks) / self.num_sequences, once)


def finish_update(
    trainable: Trainable,
    found: Tally,
    context: ParallelContext,
    *,
    loss: str,
    check: UpdateCheck | None,
    settle: bool,
) -> tuple[float, bool]:
    """The optimizer step after a backward pass, unless `check` refuses it.

    Collective over the world. Refused: weights, optimizer and scheduler stay as they are.

    Args:
        trainable: with the gradients of one mini-batch.
        found: this rank's part of the mini-batch's losses.
        context: this rank's place.
        loss: name of the loss in `found`.
        check: asked before the weights are written; None writes them.
        settle: see `Trainable.apply`.

    Returns:
        The gradient norm before clipping, and whether the step was taken.
    """
    norm = trainable.gradient_norm()
    if check is not None:
        mean = reduce_mean(found, loss, context)
        if not check({f"{trainable.name}/grad_norm": norm, loss: mean}):
            if settle:
                trainable.settle()
            return norm, False
    trainable.apply(norm, settle=settle)
    return norm, True


def call_model(module: torch.nn.Module, micro: MicroBatch) -> Tensor:
    """One chunk's forward on this rank's positions.

    Returns:
        Hidden states, or on the last chunk logits [1, S / CP, V / TP] ([B, L / CP, V / TP] padded)
        or values [1, S / CP] ([B, L / CP]).
    """
    packed = micro.packed
    output: Tensor = module(
        input_ids=packed.tokens,
        position_ids=packed.position_ids,
        attention_mask=None,
        packed_seq_params=packed_seq_params(packed),
        padding_mask=router_segments(packed.segments, *_router_needs(module)),
    )
    return output


def _router_needs(module: torch.nn.Module) -> tuple[Any, bool]:
    """A chunk's Megatron config and whether it holds the embedding; the chunk may be wrapped."""
    bare = module
    while not hasattr(bare, "pre_process"):
        bare = bare.module
    return bare.config, bare.pre_process


def longest(micro_batches: Sequence[MicroBatch]) -> int:
    """Most positions of one forward pass on this rank."""
    return max(m.num_tokens for m in micro_batches)
