"""Proximal policy optimisation for language models (Schulman 2017; Ouyang 2022, section 3.5).

`step` is the algorithm. Every rank runs it; what communicates is said where it is defined. Left out
of the paper's setting: nothing is discounted over sentences, an episode is one response.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megappo.data.sampler import Sampler
from megappo.distributed.grad_sync import Trainable
from megappo.distributed.memory_agreement import MemoryAgreement
from megappo.distributed.metrics import Tally, reduce_tally
from megappo.distributed.offload import on_device
from megappo.distributed.parallel import ParallelContext, sum_over_data
from megappo.models.hf_export import export_hf
from megappo.roles.actor import Actor, Policy
from megappo.roles.base import Network
from megappo.roles.critic import Critic, explained_variance, explained_variance_sums
from megappo.rollout.worker import RolloutWorker
from megappo.trainer import batch_metrics
from megappo.trainer.adjustments import Adjustments
from megappo.trainer.balance import Balancer
from megappo.trainer.collect import Collector, StepScope
from megappo.trainer.corrector import Corrector
from megappo.trainer.estimate import Estimator
from megappo.trainer.guard import Guard
from megappo.trainer.memory import ModelMemory
from megappo.trainer.micro_batches import (
    MicroBatchPlanner,
    as_mini_batches,
    as_passes,
    with_trained_tokens,
)
from megappo.trainer.resources import GIB, resource_metrics
from megappo.trainer.stopwatch import Stopwatch
from megappo.trainer.utilization import Utilization
from megappo.types import MiniBatch, RolloutBatch

Plan = list[list[list[int]]]
"""For each mini-batch its forward passes, see `MicroBatchPlanner.plan`."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """How a step's samples are split."""

    mini_batch: int
    """samples on one DP rank"""
    actor: MicroBatchPlanner
    critic: MicroBatchPlanner | None
    ppo_epochs: int
    critic_warmup: int


@dataclass(kw_only=True)
class Updates:
    """One role's updates of a step: asks the guard about each, and counts what it let through."""

    guard: Guard
    step: int
    trainable: Trainable
    norms: list[float] = field(default_factory=list)
    """of the updates that were applied"""
    num_skipped: int = 0
    """refused by the guard"""
    num_empty: int = 0
    """left out, as no response of the mini-batch had a trained token"""
    lengths: Sequence[int] = ()
    """tokens of this rank's samples, once for each update that is made with them"""

    def check(self, figures: Mapping[str, float]) -> bool:
        """Whether an update may write weights; see `Guard.admit`.

        Collective over the world where the gradient is not finite.
        """
        norm = figures[self._metric]
        detail = "" if math.isfinite(norm) else self.trainable.first_non_finite()
        if not self.guard.admit(self.step, figures, detail=detail):
            self.num_skipped += 1
            return False
        self.norms.append(norm)
        return True

    @property
    def num_tried(self) -> int:
        """Updates whose gradients were computed, applied or not."""
        return len(self.norms) + self.num_skipped

    def metrics(self) -> dict[str, float]:
        """The mean gradient norm of the updates that were applied, if any was."""
        return {self._metric: sum(self.norms) / len(self.norms)} if self.norms else {}

    @property
    def _metric(self) -> str:
        return f"{self.trainable.name}/grad_norm"


@dataclass(kw_only=True)
class PPOTrainer:
    """One rank's part of the run. `step_number` counts finished steps."""

    context: ParallelContext
    sampler: Sampler
    rollouts: RolloutWorker
    collector: Collector
    actor: Actor
    reference: Policy | None
    critic: Critic | None
    estimator: Estimator
    guard: Guard
    plan: StepPlan
    balancer: Balancer | None
    corrector: Corrector | None
    memory: ModelMemory
    utilization: Utilization
    memory_agreement: MemoryAgreement
    adjustments: Adjustments = field(default_factory=Adjustments)
    step_number: int = 0
    on_phase: Callable[[int, str], None] = lambda step, phase: None
    """Told of each phase as it begins."""
    last_batch: RolloutBatch | None = field(default=None, repr=False)

    @property
    def trainables(self) -> dict[str, Trainable]:
        """The models that are trained, by role."""
        roles = {"actor": self.actor, "critic": self.critic}
        return {name: role.trainable for name, role in roles.items() if role is not None}

    @property
    def networks(self) -> dict[str, Network]:
        """Of the models that are trained, by role."""
        actor = {"actor": self.actor.policy.network}
        return actor if self.critic is None else actor | {"critic": self.critic.network}

    def step(self, *, may_stop: Callable[[], None] = lambda: None) -> Mapping[str, float]:
        """One PPO step; returns its metrics, equal on all ranks. Collective over the world.

        Args:
            may_stop: called where the step can be given up without a trace, as long as nothing was
                updated: it may raise, on all ranks alike.

        Raises:
            GuardStop: the samples are not what the trainer takes them for; nothing was updated.
            StepAbandoned: a guard ended the step in the middle of its updates.
            MemoryLost: a rank found no device memory; on all ranks, where they can agree on it.
        """
        tally, number = self._tally(), self.step_number + 1
        watch = Stopwatch(self.context.device, on_phase=partial(self.on_phase, number))
        memory = self.memory.offload()
        scope = StepScope(
            number=number,
            salt=self.adjustments.sampling_salt,
            watch=watch,
            tally=tally,
            may_stop=may_stop,
        )
        batch = self.last_batch = self.collector.collect(scope)
        with watch.phase("sleep"):
            released = self.rollouts.sleep()
        with watch.phase("balance"):
            batch, balance_metrics = self._balance(batch)
            actor_plan = self.plan.actor.plan(batch.total_lengths)
            critic_plan = self._critic_plan(batch)
        agreeing = self.memory_agreement.agreeing
        with watch.phase("log_probs"), agreeing():
            passes = as_passes(actor_plan, self.plan.mini_batch)
            old_log_probs, entropy = self.actor.log_probs(batch, passes)
            batch = batch.with_fields(old_log_probs=old_log_probs)
        with watch.phase("ref"), agreeing():
            if self.reference is not None:
                batch = batch.with_fields(ref_log_probs=self.reference.log_probs(batch, passes)[0])
        with watch.phase("values"), agreeing():
            batch, values_after = self._value(batch, critic_plan)
        may_stop()
        with watch.phase("advantages"):
            sampled, batch = batch, self._correct(batch)
            batch = self.estimator.estimate(
                batch, values_after, tally, kl_factor=self.adjustments.kl_factor
            )
            before = self._describe(batch, entropy, sampled)
            self.guard.check(number, before)
        with watch.phase("update_critic"):
            of_critic = self._update_critic(batch, critic_plan, tally, number)
        with watch.phase("update_actor"), on_device(self.actor.trainable.memory):
            minis = as_mini_batches(batch, actor_plan, self.plan.mini_batch)
            of_actor = self._update_actor(minis, tally, number)
        updates = [taken for taken in (of_actor, of_critic) if taken is not None]
        self.step_number = number
        with watch.phase("sync"):
            pushed = self.push_weights()
        self.on_phase(number, "report")
        return {
            **before,
            **pushed,
            **balance_metrics,
            **reduce_tally(tally, self.context),
            **self._optimizer_metrics(of_actor, updates),
            **self._speed(
                watch.metrics(),
                batch,
                {**self.memory.report(memory), **self._released(released)},
                updates,
            ),
        }

    def push_weights(self) -> Mapping[str, float]:
        """The actor's weights to every engine, as version step + 1; 0 are the folder's.

        Collective over the world. Returns the metrics of `RolloutWorker.push`.
        """
        if self.rollouts.sleeps:
            self.memory.offload()  # An engine that wakes needs the room.
        return self.rollouts.push(self._export, version=self.step_number + 1)

    @contextmanager
    def _export(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """The actor's weights as they are now, on the device inside. Collective: `export_hf`."""
        with on_device(self.actor.trainable.memory, "params"):
            yield export_hf(self.actor.trainable.chunks, self.actor.policy.network.spec)

    def _released(self, num_bytes: int) -> dict[str, float]:
        """What sleeping engines gave to the device; a CPU has no memory of theirs to count."""
        if not self.rollouts.sleeps or self.context.device.type != "cuda":
            return {}
        return {"perf/engine_released_gb": num_bytes / GIB}

    def _balance(self, batch: RolloutBatch) -> tuple[RolloutBatch, Mapping[str, float]]:
        return (batch, {}) if self.balancer is None else self.balancer.rebalance(batch)

    def _correct(self, batch: RolloutBatch) -> RolloutBatch:
        return batch if self.corrector is None else self.corrector.correct(batch)

    def _critic_plan(self, batch: RolloutBatch) -> Plan:
        return [] if self.plan.critic is None else self.plan.critic.plan(batch.total_lengths)

    def _value(self, batch: RolloutBatch, plan: Plan) -> tuple[RolloutBatch, Tensor | None]:
        """The batch with values, and those after each sample's last token, if there is a critic."""
        if self.critic is None:
            return batch, None
        passes = as_passes(plan, self.plan.mini_batch)
        values, values_after = self.critic.values(batch, passes)
        return batch.with_fields(values=values), values_after

    def _update_critic(
        self, batch: RolloutBatch, plan: Plan, tally: Tally, number: int
    ) -> Updates | None:
        critic = self.critic
        if critic is None:
            return None
        minis = as_mini_batches(batch, plan, self.plan.mini_batch)
        taken = self._updates(number, critic.trainable)
        order = self._order(minis, taken)
        with on_device(critic.trainable.memory):
            for i, mini in enumerate(order):
                with self._passes(critic.trainable):
                    critic.update(mini, tally, settle=i == len(order) - 1, check=taken.check)
        return taken

    def _update_actor(self, minis: Sequence[MiniBatch], tally: Tally, number: int) -> Updates:
        taken = self._updates(number, self.actor.trainable)
        if number <= self.plan.critic_warmup:
            return taken
        order = self._order(minis, taken)
        for i, mini in enumerate(order):
            with self._passes(self.actor.trainable):
                self.actor.update(
                    mini,
                    tally,
                    is_first=i == 0,
                    settle=i == len(order) - 1,
                    kl_factor=self.adjustments.kl_factor,
                    check=taken.check,
                )
        return taken

    def _order(self, minis: Sequence[MiniBatch], taken: Updates) -> list[MiniBatch]:
        """The mini-batches of all updates; empty ones are counted alone. Collective over DP."""
        filled = with_trained_tokens(minis, self.context)
        taken.num_empty = (len(minis) - len(filled)) * self.plan.ppo_epochs
        lengths = [length for mini in filled for length in mini.samples.total_lengths]
        taken.lengths = lengths * self.plan.ppo_epochs
        return filled * self.plan.ppo_epochs

    def _updates(self, number: int, trainable: Trainable) -> Updates:
        return Updates(guard=self.guard, step=number, trainable=trainable)

    @contextmanager
    def _passes(self, trainable: Trainable) -> Iterator[None]:
        """An update, in which a rank without memory says so while the others wait to reduce."""
        sync = trainable.grad_sync
        met, sync.before = sync.num_met, partial(self.memory_agreement.agree, "")
        found = ""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if sync.num_met != met or not self.memory_agreement.possible:
                raise
            found = str(error)
        if found:  # out of the handler, which holds what the pass had in memory
            self.memory_agreement.agree(found)

    def _tally(self) -> Tally:
        tally = Tally()
        tally.declare((*self.collector.means, *Estimator.MEANS, *self.actor.means), Actor.MAXIMA)
        if self.critic is not None:
            tally.declare(self.critic.means, Critic.MAXIMA)
        return tally

    def _describe(
        self, batch: RolloutBatch, entropy: Tensor, sampled: RolloutBatch
    ) -> dict[str, float]:
        """Metrics of the samples, reduced; `sampled` before corrections. Collective over the world.

        What is trained on is described after corrections, the engine-trainer gap before.
        """
        tally = Tally()
        tally.declare(batch_metrics.MEANS, batch_metrics.MAXIMA)
        if self.critic is not None:
            tally.declare(batch_metrics.CRITIC_MEANS)
        if self.corrector is not None:
            tally.declare(self.corrector.means)
        if self.context.reports_samples:
            batch_metrics.add_batch(tally, batch, entropy)
            batch_metrics.add_mismatch(tally, sampled)
            if self.corrector is not None:
                self.corrector.measure(tally, sampled, batch)
        reduced = batch_metrics.finish(reduce_tally(tally, self.context))
        if batch.values is None:
            return reduced
        assert batch.returns is not None
        sums = explained_variance_sums(batch.values, batch.returns, batch.response_mask)
        reduced["critic/vf_explained_var"] = explained_variance(sum_over_data(sums, self.context))
        return reduced

    def _optimizer_metrics(self, of_actor: Updates, updates: Sequence[Updates]) -> dict[str, float]:
        found = {f"{name}/lr": trainable.lr for name, trainable in self.trainables.items()}
        for taken in updates:
            found |= taken.metrics()
        return found | {
            "actor/kl_coef": self.estimator.kl_controller.kl_coef * self.adjustments.kl_factor,
            "training/optimizer_steps": float(len(of_actor.norms)),
            "training/skipped_updates": float(sum(u.num_skipped + u.num_empty for u in updates)),
            "training/empty_updates": float(sum(taken.num_empty for taken in updates)),
            "training/epoch": float(self.sampler.epoch),
            **self.sampler.metrics(),
            "rollout/weight_version": float(self.rollouts.weight_version),
        }

    def _speed(
        self,
        timing: dict[str, float],
        batch: RolloutBatch,
        memory: Mapping[str, float],
        updates: Sequence[Updates],
    ) -> dict[str, float]:
        """Throughput, as verl defines it: all tokens of the batch / step time / ranks."""
        tally = Tally()
        for name, seconds in timing.items():
            tally.add(name, seconds, 1)
        for name, value in {**resource_metrics(self.context.device), **memory}.items():
            tally.add_max(name, value)
        reports = self.context.reports_samples
        tally.add("perf/tokens_a_rank", sum(batch.total_lengths) if reports else 0, 1)
        taken = {update.trainable.name: update.lengths for update in updates if reports}
        self.utilization.add(tally, taken)
        reduced = dict(reduce_tally(tally, self.context))
        all_tokens = reduced.pop("perf/tokens_a_rank") * self.context.world_size
        reduced["perf/total_num_tokens"] = all_tokens
        reduced["perf/tokens_per_s"] = all_tokens / reduced["timing_s/step"]
        reduced["perf/throughput"] = reduced["perf/tokens_per_s"] / self.context.world_size
        trained = [update.trainable.name for update in updates if update.num_tried]
        took = {role: reduced[f"timing_s/update_{role}"] for role in trained}
        return reduced | self.utilization.finish(reduced, seconds=took)
