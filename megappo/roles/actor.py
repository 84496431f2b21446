"""The policy: log-probs of its samples, and its update. Also the frozen reference.

Log-probs are of logits / temperature, the distribution that the samples were drawn from. The pass
before the update and the update itself use the same micro-batches, so that before the first
optimizer step of a batch the probability ratio is exactly 1, bit for bit. With
`use_rollout_log_probs` the loss takes the ratio to the engine's log-probs, which is only near 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megappo.config.learning import ActorSection
from megappo.distributed.grad_sync import Trainable
from megappo.distributed.metrics import Tally
from megappo.distributed.offload import Offloader, on_device
from megappo.distributed.parallel import tensor_parallel_group
from megappo.distributed.pipeline import LossSum, run_forward_backward
from megappo.distributed.vocab_parallel import log_probs_and_entropy
from megappo.models.lora import dropping, without_adapters
from megappo.ppo.losses import aggregation_weights, kl_loss
from megappo.ppo.masking import masked_sum
from megappo.roles.base import GIB, Network, UpdateCheck, call_model, finish_update, longest
from megappo.roles.micro_batch import MicroBatch
from megappo.roles.policy_losses import PolicyLoss
from megappo.types import MiniBatch, RolloutBatch


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A language model that gives log-probs; by itself the frozen reference."""

    network: Network
    chunks: Sequence[torch.nn.Module]
    temperature: float
    memory: Offloader | None
    """Moves the weights between device and host; None under fully sharded data parallel."""
    without_adapters: bool = False
    """It is the actor's own model, as that was before its adapters were trained."""

    def log_probs(
        self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        """(log-probs, entropy), each [B, T] float32 on the CPU. Collective over the replica."""

        def finish(logits: Tensor, micro: MicroBatch) -> list[Tensor]:
            return list(self.token_log_probs(logits, micro, with_entropy=True))

        bare = without_adapters(self.chunks) if self.without_adapters else nullcontext()
        with on_device(self.memory, "params"), bare:
            log_probs, entropy = self.network.fill(
                self.chunks, batch, micro_batches, finish, num_outputs=2
            )
        return log_probs, entropy

    def token_log_probs(
        self, logits: Tensor, micro: MicroBatch, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """Logits of this rank's positions -> (log-probs, entropy), each [b, T]. Collective over TP.

        Both are 0 where another context-parallel rank has the result; without `with_entropy` the
        entropy is 0 everywhere.
        """
        log_probs, entropy = log_probs_and_entropy(
            logits,
            micro.packed.labels,
            tp_group=tensor_parallel_group(),
            vocab_size=self.network.spec.vocab_size,
            temperature=self.temperature,
            with_entropy=with_entropy,
        )
        of_tokens = micro.to_responses(log_probs)
        if entropy is None:
            return of_tokens, torch.zeros_like(of_tokens)
        return of_tokens, micro.to_responses(entropy)


@dataclass(frozen=True, kw_only=True)
class Actor:
    """The policy that is trained."""

    policy: Policy
    trainable: Trainable
    settings: ActorSection
    policy_loss: PolicyLoss

    MEANS: ClassVar = (
        "actor/loss",
        "actor/pg_loss",
        "actor/pg_clipfrac",
        "actor/pg_clipfrac_lower",
        "actor/ppo_kl",
        "actor/kl_loss",
        "actor/update_entropy",
    )
    MAXIMA: ClassVar = ("actor/first_ratio_diff_max", "perf/activations_gb/actor")

    @property
    def means(self) -> tuple[str, ...]:
        """Means that `update` adds to its tally."""
        experts = self.policy.network.spec.num_experts
        return (*self.MEANS, *(["actor/moe_aux_loss"] if experts else []))

    def log_probs(
        self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        """See `Policy.log_probs`."""
        return self.policy.log_probs(batch, micro_batches)

    def update(
        self,
        mini: MiniBatch,
        tally: Tally,
        *,
        is_first: bool,
        settle: bool = True,
        kl_factor: float = 1.0,
        check: UpdateCheck | None = None,
    ) -> float:
        """One optimizer step on one mini-batch; returns the gradient norm before clipping.

        Collective over the world.

        Args:
            mini: with old_log_probs, advantages and, for a KL loss, ref_log_probs;
                rollout_is_weights multiply the policy loss where they are set.
            tally: gets the metrics of this rank's tokens, if the step is taken.
            is_first: no step was taken since `old_log_probs`; their ratio is then measured.
            settle: False if another update follows at once; see `Trainable.apply`.
            kl_factor: times kl_loss_coef.
            check: may refuse the optimizer step, see `finish_update`.
        """
        network = self.policy.network
        cuts = network.cut(mini.samples, mini.micro_batches)
        balance = network.balance_experts(
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
                loss=lambda logits, micro: self._loss(logits, micro, is_first, kl_factor),
                max_tokens=longest(cuts),
            )
        measured = found if network.context.reports_losses else Tally()
        if balance is not None:
            balance.add_to(measured, "actor/moe_aux_loss", network.context)
        tally.add_max("perf/activations_gb/actor", saved / GIB)
        norm, taken = finish_update(
            self.trainable, measured, network.context, loss="actor/loss", check=check, settle=settle
        )
        if taken:
            tally.merge(measured)
        return norm

    def _loss(self, logits: Tensor, micro: MicroBatch, is_first: bool, kl_factor: float) -> LossSum:
        s, samples = self.settings, micro.samples
        device = logits.device
        mask = micro.owned_mask.to(device)
        log_probs, entropy = self.policy.token_log_probs(
            logits, micro, with_entropy=s.entropy_coeff > 0
        )
        assert samples.old_log_probs is not None
        assert samples.advantages is not None
        old = samples.old_log_probs.to(device)
        pg = self.policy_loss(
            log_probs,
            samples.rollout_log_probs.to(device) if s.use_rollout_log_probs else old,
            samples.advantages.to(device),
            mask,
        )
        weights = aggregation_weights(samples.response_mask, s.loss_agg_mode).to(device)
        denominator = self.policy.network.denominator(samples.response_mask, s.loss_agg_mode)
        loss = pg.loss
        if samples.rollout_is_weights is not None:
            loss = loss * samples.rollout_is_weights.to(device)
        parts = {"actor/pg_loss": loss}
        if s.entropy_coeff > 0:
            parts["actor/update_entropy"] = torch.where(mask, entropy, 0.0)
            loss = loss - s.entropy_coeff * parts["actor/update_entropy"]
        if samples.ref_log_probs is not None and s.use_kl_loss:
            kl = kl_loss(log_probs, samples.ref_log_probs.to(device), mask, kind=s.kl_loss_type)
            parts["actor/kl_loss"] = kl.loss
            loss = loss + s.kl_loss_coef * kl_factor * kl.loss
        parts["actor/loss"] = loss
        tally = Tally()
        for name, part in parts.items():
            total = masked_sum(part.detach() * weights, mask)
            tally.add(name, total.item(), denominator.item())
        for name, (total, count) in pg.metrics.items():
            if f"actor/{name}" in self.MEANS:
                tally.add(f"actor/{name}", total.item(), count.item())
        if is_first:
            tally.add_max("actor/first_ratio_diff_max", _ratio_diff(log_probs, old, mask))
        return LossSum(total=masked_sum(loss * weights, mask), denominator=denominator, tally=tally)


def _ratio_diff(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> float:
    """Largest |exp(log-prob - old log-prob) - 1| over trained tokens; 0 if there is none."""
    gap = torch.where(mask, log_probs.detach() - old_log_probs, 0.0).expm1().abs()
    return gap.max().item() if gap.numel() else 0.0
