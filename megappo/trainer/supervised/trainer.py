"""One step of training on given answers: a batch, its forward and backward passes, an update."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megappo.data.examples import Example, ExampleDataset, as_samples
from megappo.data.sampler import PromptSampler, rank_share
from megappo.distributed.metrics import Tally, reduce_tally
from megappo.distributed.parallel import ParallelContext
from megappo.roles.learner import Learner
from megappo.trainer.evaluate import blocks
from megappo.trainer.guard import Guard
from megappo.trainer.micro_batches import MicroBatchPlanner
from megappo.trainer.resources import resource_metrics
from megappo.trainer.utilization import Utilization
from megappo.types import MiniBatch, RolloutBatch


@dataclass(kw_only=True)
class SupervisedTrainer:
    """One rank's part of the run. `step_number` counts finished steps."""

    context: ParallelContext
    train_set: ExampleDataset
    val_set: ExampleDataset | None
    sampler: PromptSampler
    learner: Learner
    planner: MicroBatchPlanner
    """its samples are rows: a pair is one"""
    guard: Guard
    utilization: Utilization
    step_number: int = 0
    on_phase: Callable[[int, str], None] = lambda step, phase: None
    """Told of each phase as it begins."""
    _skipped: bool = field(default=False, init=False)
    """Whether the guard refused the last update."""

    @property
    def name(self) -> str:
        """Of the objective: stands before its metrics."""
        return self.learner.objective.name

    def step(self) -> Mapping[str, float]:
        """One step; returns its metrics, equal on all ranks. Collective over the world.

        Raises:
            StepAbandoned: a guard ends the run; no weight was written.
            DataError: a row cannot be used.
        """
        number, started = self.step_number + 1, time.perf_counter()
        tally = Tally()
        tally.declare(self.learner.means, self.learner.maxima)
        self.on_phase(number, "update")
        waited_s = self.learner.trainable.grad_sync.wait_s
        examples = self._next_examples()
        samples = as_samples(examples)
        passes = self._passes(self.planner.plan(self._lengths(examples))[0])
        mini = MiniBatch(samples=samples, micro_batches=tuple(tuple(p) for p in passes))
        norm = self.learner.update(mini, tally, check=self._check)
        self.step_number = number
        self.on_phase(number, "report")
        waited_s = self.learner.trainable.grad_sync.wait_s - waited_s
        return {
            **reduce_tally(tally, self.context),
            f"{self.name}/grad_norm": norm,
            f"{self.name}/lr": self.learner.trainable.lr,
            "training/epoch": float(self.sampler.epoch),
            "training/skipped_updates": float(self._skipped),
            **self._speed(time.perf_counter() - started, samples, waited_s),
        }

    def validate(self) -> Mapping[str, float]:
        """`val/<metric>` over all validation rows, if there are any. Collective over the world."""
        if self.val_set is None:
            return {}
        started = time.perf_counter()
        self.on_phase(self.step_number, "validate")
        tally = Tally()
        tally.declare(f"{self.name}/{metric}" for metric in self.learner.objective.metrics)
        context = self.context
        for rows in blocks(len(self.val_set), rank=context.dp_rank, world_size=context.dp):
            examples = self.val_set.examples(rows)
            samples = as_samples(examples)
            passes = self._passes(self.planner.plan_any(self._lengths(examples)))
            self.learner.validate(samples, passes, tally)
        reduced = reduce_tally(tally, context)
        found = {name.replace(self.name, "val", 1): value for name, value in reduced.items()}
        seconds = time.perf_counter() - started
        return {**found, "val/rows": float(len(self.val_set)), "timing_s/validate": seconds}

    def _next_examples(self) -> list[Example]:
        _, rows = self.sampler.next_batch()
        mine = rank_share(
            rows,
            mini_batch_size=self.sampler.batch_size,
            dp_rank=self.context.dp_rank,
            dp_size=self.context.dp,
        )
        return self.train_set.examples(mine)

    def _lengths(self, examples: Sequence[Example]) -> list[int]:
        """Positions of each row in a forward pass: of all its answers, each padded by itself."""
        padded = self.planner.alignment.padded
        return [sum(padded(length) for length in example.lengths) for example in examples]

    def _passes(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Forward passes of rows as forward passes of samples."""
        answers = self.learner.objective.answers
        return [[row * answers + k for row in part for k in range(answers)] for part in rows]

    def _check(self, figures: Mapping[str, float]) -> bool:
        """Whether the update may write weights; see `Guard.admit`. Collective over the world."""
        norm = figures[f"{self.name}/grad_norm"]
        finite = math.isfinite(norm)
        detail = "" if finite else self.learner.trainable.first_non_finite()
        admitted = self.guard.admit(self.step_number + 1, figures, detail=detail)
        self._skipped = not admitted
        return admitted

    def _speed(self, seconds: float, samples: RolloutBatch, waited_s: float) -> dict[str, float]:
        tally = Tally()
        tally.add("timing_s/step", seconds, 1)
        tally.add_max(f"perf/grad_sync_wait_s/{self.name}", waited_s)
        for name, value in resource_metrics(self.context.device).items():
            tally.add_max(name, value)
        tokens = sum(samples.total_lengths) if self.context.reports_samples else 0
        tally.add("perf/tokens_a_rank", tokens, 1)
        reports = self.context.reports_samples
        self.utilization.add(tally, {self.name: samples.total_lengths} if reports else {})
        reduced = dict(reduce_tally(tally, self.context))
        reduced["perf/throughput"] = reduced.pop("perf/tokens_a_rank") / reduced["timing_s/step"]
        total = reduced["perf/throughput"] * self.context.world_size
        use = self.utilization.finish(reduced, seconds={self.name: reduced["timing_s/step"]})
        return {**reduced, **use, "perf/tokens_per_s": total}
