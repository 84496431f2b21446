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

from megappo.data.prompts import PromptDataset
from megappo.data.sampler import PromptSampler, rank_share
from megappo.distributed.grad_sync import Trainable
from megappo.distributed.memory_agreement import MemoryAgreement
from megappo.distributed.metrics import Tally, reduce_tally
from megappo.distributed.offload import on_device
from megappo.distributed.parallel import ParallelContext, sum_over_data
from megappo.models.weights import export_hf
from megappo.roles.actor import Actor, Policy
from megappo.roles.critic import Critic, explained_variance, explained_variance_sums
from megappo.rollout.worker import RolloutWorker
from megappo.trainer import batch_metrics
from megappo.trainer.adjustments import Adjustments
from megappo.trainer.balance import Balancer
from megappo.trainer.corrector import Corrector
from megappo.trainer.estimate import Estimator
from megappo.trainer.guard import Guard
from megappo.trainer.memory import ModelMemory
from megappo.trainer.micro_batches import MicroBatchPlanner, as_mini_batches, as_passes
from megappo.trainer.resources import GIB, resource_metrics
from megappo.trainer.scoring import BatchScorer
from megappo.trainer.stopwatch import Stopwatch
from megappo.types import MiniBatch, PromptBatch, RolloutBatch


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """How a step's samples are split."""

    mini_batch_prompts: int
    """over all DP ranks"""
    mini_batch: int
    """samples on one DP rank"""
    actor: MicroBatchPlanner
    critic: MicroBatchPlanner
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
    dataset: PromptDataset
    sampler: PromptSampler
    rollouts: RolloutWorker
    scorer: BatchScorer
    actor: Actor
    reference: Policy | None
    critic: Critic
    estimator: Estimator
    guard: Guard
    plan: StepPlan
    balancer: Balancer | None
    corrector: Corrector | None
    memory: ModelMemory
    memory_agreement: MemoryAgreement
    adjustments: Adjustments = field(default_factory=Adjustments)
    step_number: int = 0
    on_phase: Callable[[int, str], None] = lambda step, phase: None
    """Told of each phase as it begins."""
    last_batch: RolloutBatch | None = field(default=None, repr=False)

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
        prompts = self._next_prompts()
        with watch.phase("generate"):
            salt = self.adjustments.sampling_salt
            batch = self.rollouts.generate(prompts, step=number, salt=salt)
        may_stop()
        with watch.phase("score"):
            batch = self.scorer.score(batch, self.rollouts.my_part(len(batch)), tally)
        may_stop()
        self.last_batch = batch
        with watch.phase("sleep"):
            released = self.rollouts.sleep()
        with watch.phase("balance"):
            batch, balance_metrics = self._balance(batch)
            actor_plan = self.plan.actor.plan(batch.total_lengths)
            critic_plan = self.plan.critic.plan(batch.total_lengths)
        agreeing = self.memory_agreement.agreeing
        with watch.phase("log_probs"), agreeing():
            passes = as_passes(actor_plan, self.plan.mini_batch)
            old_log_probs, entropy = self.actor.log_probs(batch, passes)
            batch = batch.with_fields(old_log_probs=old_log_probs)
        with watch.phase("ref"), agreeing():
            if self.reference is not None:
                batch = batch.with_fields(ref_log_probs=self.reference.log_probs(batch, passes)[0])
        with watch.phase("values"), agreeing():
            passes = as_passes(critic_plan, self.plan.mini_batch)
            values, values_after = self.critic.values(batch, passes)
            batch = batch.with_fields(values=values)
        may_stop()
        with watch.phase("advantages"):
            sampled, batch = batch, self._correct(batch)
            batch = self.estimator.estimate(
                batch, values_after, tally, kl_factor=self.adjustments.kl_factor
            )
            before = self._describe(batch, entropy, sampled)
            self.guard.check(number, before)
        with watch.phase("update_critic"), on_device(self.critic.trainable.memory):
            minis = as_mini_batches(batch, critic_plan, self.plan.mini_batch)
            of_critic = self._update_critic(minis, tally, number)
        with watch.phase("update_actor"), on_device(self.actor.trainable.memory):
            minis = as_mini_batches(batch, actor_plan, self.plan.mini_batch)
            of_actor = self._update_actor(minis, tally, number)
        self.step_number = number
        with watch.phase("sync"):
            pushed = self.push_weights()
        self.on_phase(number, "report")
        return {
            **before,
            **pushed,
            **balance_metrics,
            **reduce_tally(tally, self.context),
            **self._optimizer_metrics(of_actor, of_critic),
            **self._speed(
                watch.metrics(), batch, {**self.memory.report(memory), **self._released(released)}
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

    def _next_prompts(self) -> PromptBatch:
        epoch, rows = self.sampler.next_batch()
        mine = rank_share(
            rows,
            mini_batch_size=self.plan.mini_batch_prompts,
            dp_rank=self.context.dp_rank,
            dp_size=self.context.dp,
        )
        return PromptBatch(epoch=epoch, prompts=tuple(self.dataset.rows(mine)))

    def _balance(self, batch: RolloutBatch) -> tuple[RolloutBatch, Mapping[str, float]]:
        return (batch, {}) if self.balancer is None else self.balancer.rebalance(batch)

    def _correct(self, batch: RolloutBatch) -> RolloutBatch:
        return batch if self.corrector is None else self.corrector.correct(batch)

    def _update_critic(self, minis: Sequence[MiniBatch], tally: Tally, number: int) -> Updates:
        order = [mini for _ in range(self.plan.ppo_epochs) for mini in minis]
        taken = self._updates(number, self.critic.trainable)
        for i, mini in enumerate(order):
            with self._passes(self.critic.trainable):
                self.critic.update(mini, tally, settle=i == len(order) - 1, check=taken.check)
        return taken

    def _update_actor(self, minis: Sequence[MiniBatch], tally: Tally, number: int) -> Updates:
        taken = self._updates(number, self.actor.trainable)
        if number <= self.plan.critic_warmup:
            return taken
        order = [mini for _ in range(self.plan.ppo_epochs) for mini in minis]
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
        tally.declare(
            (*BatchScorer.MEANS, *Estimator.MEANS, *self.actor.means, *self.critic.means),
            (*Actor.MAXIMA, *Critic.MAXIMA),
        )
        return tally

    def _describe(
        self, batch: RolloutBatch, entropy: Tensor, sampled: RolloutBatch
    ) -> dict[str, float]:
        """Metrics of the samples, reduced; `sampled` before corrections. Collective over the world.

        What is trained on is described after corrections, the engine-trainer gap before.
        """
        tally = Tally()
        tally.declare(batch_metrics.MEANS, batch_metrics.MAXIMA)
        if self.corrector is not None:
            tally.declare(self.corrector.means)
        if self.context.reports_samples:
            batch_metrics.add_batch(tally, batch, entropy)
            batch_metrics.add_mismatch(tally, sampled)
            if self.corrector is not None:
                self.corrector.measure(tally, sampled, batch)
        reduced = batch_metrics.finish(reduce_tally(tally, self.context))
        assert batch.values is not None
        assert batch.returns is not None
        sums = explained_variance_sums(batch.values, batch.returns, batch.response_mask)
        reduced["critic/vf_explained_var"] = explained_variance(sum_over_data(sums, self.context))
        return reduced

    def _optimizer_metrics(self, of_actor: Updates, of_critic: Updates) -> dict[str, float]:
        skipped = of_actor.num_skipped + of_critic.num_skipped
        return {
            "critic/lr": self.critic.trainable.lr,
            "actor/lr": self.actor.trainable.lr,
            "actor/kl_coef": self.estimator.kl_controller.kl_coef * self.adjustments.kl_factor,
            "training/optimizer_steps": float(len(of_actor.norms)),
            "training/skipped_updates": float(skipped),
            "training/epoch": float(self.sampler.epoch),
            "rollout/weight_version": float(self.rollouts.weight_version),
            **of_actor.metrics(),
            **of_critic.metrics(),
        }

    def _speed(
        self, timing: dict[str, float], batch: RolloutBatch, memory: Mapping[str, float]
    ) -> dict[str, float]:
        """Throughput, as verl defines it: all tokens of the batch / step time / ranks."""
        tally = Tally()
        for name, seconds in timing.items():
            tally.add(name, seconds, 1)
        for name, value in {**resource_metrics(self.context.device), **memory}.items():
            tally.add_max(name, value)
        tokens = sum(batch.total_lengths) if self.context.reports_samples else 0
        tally.add("perf/tokens_a_rank", tokens, 1)
        reduced = dict(reduce_tally(tally, self.context))
        all_tokens = reduced.pop("perf/tokens_a_rank") * self.context.world_size
        reduced["perf/total_num_tokens"] = all_tokens
        reduced["perf/tokens_per_s"] = all_tokens / reduced["timing_s/step"]
        reduced["perf/throughput"] = reduced["perf/tokens_per_s"] / self.context.world_size
        return reduced
