"""Saves in several layouts of the same ranks, and loads every checkpoint in the layouts after it.

Each layout updates actor and critic once, saves, updates again; then it builds new models for each
checkpoint of another layout that is there, loads it and makes the second update from there.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

from megappo.checkpoint.layout import KeepPolicy
from megappo.checkpoint.store import CheckpointStore
from megappo.config import Config, load
from megappo.distributed import parallel
from megappo.distributed.metrics import Tally, reduce_tally
from megappo.models.spec import load_spec
from megappo.roles.actor import Actor
from megappo.roles.critic import Critic
from megappo.trainer.build import build_roles
from megappo.trainer.preflight import model_paths
from tests.distributed.launch import free_port
from tests.distributed.workers.resume import minibatch
from tests.distributed.workers.update import export, share, whole_batch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("layouts", help='JSON: [[name, ["key=value", ...]], ...]')
    arguments = parser.parse_args()
    launch = parallel.LaunchEnvironment.read()
    for name, overrides in json.loads(arguments.layouts):
        config = load(arguments.config, overrides)
        degrees = parallel.Degrees.of(config.parallel)
        context = parallel.start(launch, degrees, device="cpu", seed=1, timeout_s=300)
        run_layout(name, config, context, arguments.out)
        # Another port for the next groups: a rank must not meet the store of these.
        ports = parallel.all_gather_objects(free_port(), context.world_group)
        parallel.stop(context)
        os.environ["MASTER_PORT"] = str(ports[0])


def run_layout(name: str, config: Config, context: parallel.ParallelContext, out: Path) -> None:
    specs = {role: load_spec(path) for role, path in model_paths(config).items()}

    def build() -> dict[str, Any]:
        actor, critic, _ = build_roles(config, specs, context, total_optimizer_steps=9)
        return {"actor": actor, "critic": critic}

    def trainables(roles: dict[str, Any]) -> dict[str, Any]:
        return {role: made.trainable for role, made in roles.items()}

    roles = build()
    mini = minibatch(roles, share(whole_batch(specs["actor"].vocab_size), context))
    others = [p for p in sorted(out.iterdir()) if p.is_dir() and p.name != name]
    for folder in others:
        fresh = build()
        make_store(folder, context).load(folder / "step_000001", trainables(fresh), seed=7)
        draw = torch.rand(3)
        found = update(fresh, mini, context) | {"draw": draw}
        keep(found, out / f"{folder.name}_to_{name}.pt", context)
    if (out / name).exists():
        return
    update(roles, mini, context)
    CheckpointStore(folder=out / name, policy=KeepPolicy(newest=1), context=context).save(
        1, trainables(roles), {}
    )
    keep(update(roles, mini, context), out / f"{name}.pt", context)


def make_store(folder: Path, context: parallel.ParallelContext) -> CheckpointStore:
    return CheckpointStore(folder=folder, policy=KeepPolicy(newest=1), context=context)


def update(roles: dict[str, Any], mini: Any, context: Any) -> dict[str, Any]:
    actor, critic = roles["actor"], roles["critic"]
    tally = Tally()
    tally.declare((*actor.means, *critic.means), (*Actor.MAXIMA, *Critic.MAXIMA))
    norms = [critic.update(mini, tally), actor.update(mini, tally, is_first=False)]
    weights = dict(export(actor.policy.network, "lm"))
    weights |= {f"critic.{k}": v for k, v in export(critic.network, "value").items()}
    metrics = dict(reduce_tally(tally, context))
    return {
        "losses": [metrics["critic/vf_loss"], metrics["actor/loss"]],
        "norms": norms,
        "weights": weights,
        "lr": actor.trainable.lr,
    }


def keep(result: dict[str, Any], path: Path, context: Any) -> None:
    if context.is_main:
        torch.save(result, path)


if __name__ == "__main__":
    main()
