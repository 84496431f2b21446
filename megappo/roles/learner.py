"""A model that learns from given answers, whatever the objective: its update and its validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megappo.config.supervised import TrainingSection
from megappo.distributed.grad_sync import Trainable
from megappo.distributed.metrics import Tally
from megappo.distributed.pipeline import LossSum, run_forward, run_forward_backward
from megappo.roles.base import GIB, Network, UpdateCheck, call_model, finish_update, longest
from megappo.roles.micro_batch import MicroBatch
from megappo.roles.objectives import Objective
from megappo.types import MiniBatch, RolloutBatch


@dataclass(frozen=True, kw_only=True)
class Learner:
    """The one model of a run on given answers."""

    network: Network
    trainable: Trainable
    objective: Objective
    settings: TrainingSection

    @property
    def means(self) -> tuple[str, ...]:
        """Means that `update` and `validate` add to their tallies."""
        name = self.objective.name
        experts = [f"{name}/moe_aux_loss"] if self.network.spec.num_experts else []
        return (*(f"{name}/{metric}" for metric in self.objective.metrics), *experts)

    @property
    def maxima(self) -> tuple[str, ...]:
        """Maxima that `update` adds."""
        return (f"perf/activations_gb/{self.objective.name}",)

    def update(self, mini: MiniBatch, tally: Tally, *, check: UpdateCheck | None = None) -> float:
        """One optimizer step; returns the gradient norm before clipping.

        Collective over the world.

        Args:
            mini: this rank's samples; those of a row share a micro-batch.
            tally: gets the metrics of this rank, if the step is taken.
            check: may refuse the optimizer step, see `finish_update`.
        """
        name, context = self.objective.name, self.network.context
        cuts = self.network.cut(mini.samples, mini.micro_batches)
        balance = self.network.balance_experts_by(
            self.objective.count(mini.samples),
            len(mini.samples),
            coefficient=self.settings.moe_aux_loss_coeff,
        )
        self.trainable.zero_grad()
        found, saved = run_forward_backward(
            self.trainable.chunks, cuts, call=call_model, loss=self._loss, max_tokens=longest(cuts)
        )
        measured = found if context.reports_losses else Tally()
        if balance is not None:
            balance.add_to(measured, f"{name}/moe_aux_loss", context)
        tally.add_max(f"perf/activations_gb/{name}", saved / GIB)
        norm, taken = finish_update(
            self.trainable, measured, context, loss=f"{name}/loss", check=check, settle=True
        )
        if taken:
            tally.merge(measured)
        return norm

    def validate(
        self, samples: RolloutBatch, micro_batches: Sequence[Sequence[int]], tally: Tally
    ) -> None:
        """Adds the metrics of samples that are not learnt. Collective over the replica."""
        cuts = self.network.cut(samples, micro_batches)
        parts = run_forward(
            self.trainable.chunks,
            cuts,
            call=call_model,
            finish=lambda output, micro: self._loss(output, micro).tally,
            max_tokens=longest(cuts),
        )
        if self.network.context.reports_losses:
            for part in parts:
                tally.merge(part)

    def _loss(self, output: Tensor, micro: MicroBatch) -> LossSum:
        return self.objective.loss(output, micro, self.network)
