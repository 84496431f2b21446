"""The value model: values of states, and its update. No temperature ever scales a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megappo.config.learning import CriticSection
from megappo.distributed.grad_sync import Trainable
from megappo.distributed.metrics import Tally
from megappo.distributed.offload import on_device
from megappo.distributed.pipeline import LossSum, run_forward_backward
from megappo.models.lora import dropping
from megappo.ppo.losses import aggregation_weights, value_loss
from megappo.ppo.masking import masked_sum
from megappo.roles.base import GIB, Network, UpdateCheck, call_model, finish_update, longest
from megappo.roles.micro_batch import MicroBatch
from megappo.types import MiniBatch, RolloutBatch


@dataclass(frozen=True, kw_only=True)
class Critic:
    """A model with a scalar head on its last pipeline stage."""

    network: Network
    trainable: Trainable
    settings: CriticSection

    MEANS: ClassVar = ("critic/vf_loss", "critic/vf_clipfrac")
    MAXIMA: ClassVar = ("perf/activations_gb/critic",)

    @property
    def means(self) -> tuple[str, ...]:
        """Means that `update` adds to its tally."""
        experts = self.network.spec.num_experts
        return (*self.MEANS, *(["critic/moe_aux_loss"] if experts else []))

    def values(
        self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        """Values of the states in which tokens were chosen, and of the state after the last.

        Collective over the replica.

        Returns:
            [B, T] and [B], float32 on the CPU.
        """

        def finish(values: Tensor, micro: MicroBatch) -> list[Tensor]:
            inside = micro.to_responses(values)
            after = micro.after_last(values)[:, None].expand_as(inside)
            return [inside, after]

        with on_device(self.trainable.memory, "params"):
            inside, after = self.network.fill(
                self.trainable.chunks, batch, micro_batches, finish, num_outputs=2
            )
        return inside, after[:, 0]

    def update(
        self,
        mini: MiniBatch,
        tally: Tally,
        *,
        settle: bool = True,
        check: UpdateCheck | None = None,
    ) -> float:
        """One optimizer step on one mini-batch; returns the gradient norm before clipping.

        Collective over the world.

        Args:
            mini: with values and returns.
            tally: gets the metrics of this rank's tokens, if the step is taken.
            settle: False if another update follows at once; see `Trainable.apply`.
            check: may refuse the optimizer step, see `finish_update`.
        """
        cuts = self.network.cut(mini.samples, mini.micro_batches)
        balance = self.network.balance_experts(
            mini,
            coefficient=self.settings.moe_aux_loss_coeff,
            loss_agg_mode=self.settings.loss_agg_mode,
        )
        self.trainable.zero_grad()
        with dropping(self.trainable.chunks):
            found, saved = run_forward_backward(
                self.trainable.chunks,
                cuts,
                call=call_model,
                loss=self._loss,
                max_tokens=longest(cuts),
            )
        context = self.network.context
        measured = found if context.reports_losses else Tally()
        if balance is not None:
            balance.add_to(measured, "critic/moe_aux_loss", context)
        tally.add_max("perf/activations_gb/critic", saved / GIB)
        norm, taken = finish_update(
            self.trainable, measured, context, loss="critic/vf_loss", check=check, settle=settle
        )
        if taken:
            tally.merge(measured)
        return norm

    def _loss(self, output: Tensor, micro: MicroBatch) -> LossSum:
        samples, mode = micro.samples, self.settings.loss_agg_mode
        device = output.device
        mask = micro.owned_mask.to(device)
        assert samples.values is not None
        assert samples.returns is not None
        per_token = value_loss(
            micro.to_responses(output),
            samples.values.to(device),
            samples.returns.to(device),
            mask,
            clip_range=self.settings.cliprange_value or None,
        )
        weights = aggregation_weights(samples.response_mask, mode).to(device)
        denominator = self.network.denominator(samples.response_mask, mode)
        total = masked_sum(per_token.loss * weights, mask)
        tally = Tally()
        tally.add("critic/vf_loss", total.item(), denominator.item())
        clipped, count = per_token.metrics["vf_clipfrac"]
        tally.add("critic/vf_clipfrac", clipped.item(), count.item())
        return LossSum(total=total, denominator=denominator, tally=tally)


def explained_variance_sums(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """[5] float64: count, sums of returns, returns^2, errors and errors^2; adds up over ranks."""
    v, r = values[mask].double(), returns[mask].double()
    error = r - v
    return torch.stack(
        [
            torch.tensor(float(r.numel()), dtype=torch.float64),
            r.sum(),
            (r * r).sum(),
            error.sum(),
            (error * error).sum(),
        ]
    )


def explained_variance(sums: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over all ranks; 0 where returns do not vary."""
    count, r, r2, e, e2 = sums.tolist()
    if not count:
        return 0.0
    var_returns = r2 / count - (r / count) ** 2
    var_errors = e2 / count - (e / count) ** 2
    return 1.0 - var_errors / var_returns if var_returns > 1e-12 else 0.0
