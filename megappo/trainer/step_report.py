"""What a PPO step tells besides its metrics: samples, warnings, lost engines, an epoch's end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megappo.config.guard import PPO_UPDATE_METRICS
from megappo.data.sampler import Sampler, num_ended
from megappo.rollout.worker import RolloutWorker
from megappo.trainer.examine import examples
from megappo.trainer.guard import Guard
from megappo.trainer.teller import Teller
from megappo.types import RolloutBatch


def tell_samples(
    teller: Teller, step: int, batch: RolloutBatch | None, tokenizer: Any, *, num_examine: int
) -> None:
    """Writes the step's samples, and shows some on the screen.

    Args:
        teller: of the run.
        step: finished.
        batch: of rank 0; None if this process has made no step yet.
        tokenizer: of the actor.
        num_examine: samples of each source that are shown.
    """
    if teller.records is None or batch is None:
        return
    teller.records.write_rollouts(step, batch, tokenizer)
    for text in examples(batch, tokenizer, num_examine):
        teller.say(text)


def warn(teller: Teller, guard: Guard, step: int, metrics: Mapping[str, float]) -> None:
    """Announces what a step's metrics give reason to look at."""
    texts = guard.warnings(metrics)
    if step == 1:
        texts += guard.unknown_metrics(metrics, of_updates=PPO_UPDATE_METRICS)
    for text in texts:
        teller.announce("warning", step, text)


def count_incidents(
    teller: Teller, rollouts: RolloutWorker, step: int, metrics: dict[str, float]
) -> None:
    """Adds what happened to engines since the last call, over all ranks; restarts become events.

    Args:
        teller: of the run.
        rollouts: whose engines are meant.
        step: the running one.
        metrics: get `rollout/engine_restarts` and `rollout/aborted`.
    """
    incidents = rollouts.engine.take_incidents()
    for restart in incidents.restarts:
        teller.event("engine_restarted", step, rank=restart.rank, reason=restart.reason)
    for name, count in (
        ("rollout/engine_restarts", len(incidents.restarts)),
        ("rollout/aborted", incidents.num_aborted),
    ):
        metrics[name] = metrics.get(name, 0.0) + count


def tell_epochs(teller: Teller, sampler: Sampler, step: int, *, ended_before: int) -> None:
    """Says that the data ended, where it did; another epoch, if any, draws them anew.

    A step of several batches (dynamic sampling) may end one before its last, or several.

    Args:
        teller: of the run.
        sampler: after the step.
        step: finished.
        ended_before: epochs that were over before the step.
    """
    rows = sampler.batches_per_epoch * sampler.batch_size
    for epoch in range(ended_before + 1, num_ended(sampler) + 1):
        text = f"epoch {epoch} is over after step {step}: {sampler.epoch_in_words()}"
        teller.say(f"data       {text}")
        teller.event("epoch_over", step, epoch=epoch, rows=rows)
