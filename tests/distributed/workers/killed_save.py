"""Saves without end, until it is killed; before that checks what the one before it has left.

At step n every weight and moment is n, so a checkpoint of two saves would show.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from megappo.checkpoint import layout
from megappo.checkpoint.layout import KeepPolicy
from megappo.checkpoint.store import CheckpointStore
from megappo.config import load
from megappo.distributed import parallel
from megappo.distributed.offload import optimizer_tensors
from megappo.models.spec import load_spec
from megappo.trainer.build import build_roles
from megappo.trainer.preflight import model_paths


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    config = load(arguments.config)
    launch = parallel.LaunchEnvironment.read()
    context = parallel.start(launch, parallel.Degrees(), device="cpu", seed=1, timeout_s=300)
    specs = {role: load_spec(path) for role, path in model_paths(config).items()}
    actor, critic, _ = build_roles(config, specs, context, total_optimizer_steps=9)
    models = {"actor": actor.trainable, "critic": critic.trainable}
    tensors = [
        t
        for model in models.values()
        for t in (*model.chunks[0].parameters(), *optimizer_tensors(model.optimizer))
    ]
    store = CheckpointStore(folder=arguments.out, policy=KeepPolicy(newest=1), context=context)
    step = 0
    latest = layout.latest(arguments.out)
    if latest is not None:
        step = store.load(latest, models, seed=1)["step"]
        wrong = {t.unique().tolist().__repr__() for t in tensors if (t != step).any()}
        assert not wrong, f"{latest} has {wrong}"
    print(f"ready {step}", flush=True)
    while True:
        step += 1
        with torch.no_grad():
            for tensor in tensors:
                tensor.fill_(step)
        store.begin(step, models, {})
        while store.poll(wait=False) is None:  # as a step's end does
            time.sleep(0.001)


if __name__ == "__main__":
    main()
