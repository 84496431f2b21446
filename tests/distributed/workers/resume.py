"""Saves after an update of actor and critic; updates again meanwhile, and from the files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from megappo.checkpoint import layout, streams
from megappo.checkpoint.layout import KeepPolicy
from megappo.checkpoint.store import CheckpointStore
from megappo.distributed import parallel
from megappo.distributed.metrics import Tally
from megappo.distributed.parallel import ParallelContext
from megappo.trainer.build import build_roles
from megappo.types import MiniBatch, RolloutBatch
from tests.distributed.workers.offload import many_buckets
from tests.distributed.workers.start import start_worker
from tests.distributed.workers.update import export, made_up, share, whole_batch


def main() -> None:
    worker = start_worker()
    config, context, specs = worker.config, worker.context, worker.specs

    def build() -> dict[str, Any]:
        with many_buckets(config):
            actor, critic, _ = build_roles(config, specs, context, total_optimizer_steps=9)
        return {"actor": actor, "critic": critic}

    roles = build()
    mini = minibatch(roles, share(whole_batch(specs["actor"].vocab_size), context))
    update(roles, mini)
    store = CheckpointStore(
        folder=worker.out / "checkpoints", policy=KeepPolicy(newest=1), context=context
    )
    store.begin(1, {n: r.trainable for n, r in roles.items()}, {"note": 1})
    went_on = update(roles, mini)  # while it is written
    saved = store.poll(wait=True)
    assert saved is not None
    path = saved.path
    fresh = build()
    store.load(path, {n: r.trainable for n, r in fresh.items()}, seed=1)
    resumed = update(fresh, mini)
    store.load(path, {n: r.trainable for n, r in roles.items()}, seed=1)
    rolled_back = update(roles, mini)
    torch.save(
        {
            "went_on": went_on,
            "resumed": resumed,
            "rolled_back": rolled_back,
            "draws": draws(path, context, roles),
        },
        worker.out / f"rank{context.rank}.pt",
    )
    parallel.stop(context)


def draws(path: Path, context: ParallelContext, roles: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The first number of torch's stream after a load, on this kind of device and on another."""
    actor = {"actor": roles["actor"].trainable}
    found = {}
    for saved, now in (("cpu", "cpu"), ("cuda", "cpu"), ("cpu", "cuda")):
        if context.is_main:
            layout.write_state(path, layout.read_state(path) | {"device": saved})
        parallel.barrier(context)
        elsewhere = dataclasses.replace(context, device=torch.device(now))
        store = CheckpointStore(folder=path.parent, policy=KeepPolicy(newest=1), context=elsewhere)
        store.load(path, actor, seed=7)
        found[f"{saved}_to_{now}"] = torch.rand(1)
        parallel.barrier(context)
    streams.restart(7, 1)
    return found | {"restarted": torch.rand(1)}


def minibatch(roles: dict[str, Any], batch: RolloutBatch) -> MiniBatch:
    passes = [list(range(i, i + 2)) for i in range(0, len(batch), 2)]
    old, _ = roles["actor"].log_probs(batch, passes)
    values, _ = roles["critic"].values(batch, passes)
    values = made_up(values, batch)
    batch = batch.with_fields(
        old_log_probs=old, values=values, returns=values + 1, advantages=values, ref_log_probs=old
    )
    return MiniBatch(samples=batch, micro_batches=tuple(tuple(p) for p in passes))


def update(roles: dict[str, Any], mini: MiniBatch) -> dict[str, Any]:
    norms = [
        roles["critic"].update(mini, Tally()),
        roles["actor"].update(mini, Tally(), is_first=False),
    ]
    weights = dict(export(roles["actor"].policy.network, "lm"))
    weights |= {f"critic.{k}": v for k, v in export(roles["critic"].network, "value").items()}
    return {"norms": norms, "weights": weights, "lr": roles["actor"].trainable.lr}


if __name__ == "__main__":
    main()
