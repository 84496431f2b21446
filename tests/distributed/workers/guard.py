"""A NaN in one rank's loss, and the way back to a copy in memory, on actor and critic."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from megappo.checkpoint.snapshot import Snapshot, has_room
from megappo.config.guard import GuardSection
from megappo.distributed import parallel
from megappo.distributed.metrics import Tally
from megappo.distributed.offload import on_device
from megappo.roles.actor import Actor
from megappo.trainer.build import build_roles
from megappo.trainer.guard import Guard
from megappo.trainer.micro_batches import with_trained_tokens
from megappo.trainer.ppo_trainer import Updates
from megappo.types import MiniBatch
from tests.distributed.workers import resume
from tests.distributed.workers.offload import many_buckets
from tests.distributed.workers.resume import minibatch
from tests.distributed.workers.start import start_worker
from tests.distributed.workers.update import share, whole_batch


def main() -> None:
    worker = start_worker()
    config, context, specs = worker.config, worker.context, worker.specs
    with many_buckets(config):
        actor, critic, _ = build_roles(config, specs, context, total_optimizer_steps=9)
    roles = {"actor": actor, "critic": critic}
    models = {name: role.trainable for name, role in roles.items()}
    mini = minibatch(roles, share(whole_batch(specs["actor"].vocab_size), context))
    assert has_room(models, context, local_world_size=1)
    last = context.rank == context.world_size - 1
    assert not has_room(models, context, local_world_size=10**9 if last else 1)

    mask = mini.samples.response_mask
    minis = [
        replace(mini, samples=mini.samples.with_fields(response_mask=m))
        for m in (mask & (context.dp_rank == 0), torch.zeros_like(mask), mask)
    ]
    filled = with_trained_tokens(minis, context)

    snapshot = Snapshot(models=models)
    snapshot.take({"note": [1]})  # before the first step: no optimizer has any state
    first = update(roles, mini)
    second = update(roles, mini)
    assert snapshot.restore() == {"note": [1]}
    first_again = update(roles, mini)
    snapshot.take({"note": [2]})
    skipped, again = nan_update(actor, mini, breaks=last)
    second_again = update(roles, mini)
    assert snapshot.restore() == {"note": [2]}
    second_third = update(roles, mini)
    torch.save(
        {
            "first": [first, first_again],
            "second": [second, second_again, second_third],
            "skipped": skipped,
            "allowed_again": again,
            "filled": [i for i, m in enumerate(minis) if any(m is f for f in filled)],
        },
        worker.out / f"rank{context.rank}.pt",
    )
    parallel.stop(context)


def update(roles: dict[str, Any], mini: MiniBatch) -> dict[str, Any]:
    """As the trainer does it: what is offloaded is on the device for the update alone."""
    with ExitStack() as stack:
        for role in roles.values():
            stack.enter_context(on_device(role.trainable.memory))
        return resume.update(roles, mini)


def nan_update(actor: Actor, mini: MiniBatch, *, breaks: bool) -> tuple[dict[str, Any], bool]:
    """One update, whose loss is NaN on a rank that `breaks`; what came of it."""

    class Broken(Actor):
        def _loss(self, *args: Any) -> Any:
            made = super()._loss(*args)
            return dataclasses.replace(made, total=made.total * float("nan")) if breaks else made

    broken = Broken(**{f.name: getattr(actor, f.name) for f in dataclasses.fields(actor) if f.init})
    guard = Guard(settings=GuardSection(), comparable=True)
    updates = Updates(guard=guard, step=5, trainable=actor.trainable)
    tally, before = Tally(), actor.trainable.scheduler.num_steps
    with on_device(actor.trainable.memory):
        broken.update(mini, tally, is_first=True, check=updates.check)
    (decision,) = guard.after_step(5, {})
    found = {
        "num_skipped": updates.num_skipped,
        "scheduler_steps": actor.trainable.scheduler.num_steps - before,
        "metrics": sorted(tally.sums),
        "action": decision.action,
        "reason": decision.reason,
        "detail": decision.detail,
    }
    return found, guard.streaks["non_finite_again:actor/grad_norm"] == 1


if __name__ == "__main__":
    main()
