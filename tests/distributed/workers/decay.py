"""One optimizer step without a gradient: what weight decay alone does to each parameter."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from megappo.config import load
from megappo.distributed import parallel
from megappo.models.hf_export import export_hf
from megappo.models.spec import load_spec
from megappo.trainer.build import build_roles
from megappo.trainer.preflight import model_paths


def main() -> None:
    config_path, out = map(Path, sys.argv[1:])
    config = load(config_path, ["actor.optim.weight_decay=0.5", "actor.optim.lr_warmup_steps=0"])
    context = parallel.start(
        parallel.LaunchEnvironment.read(),
        parallel.Degrees.of(config.parallel),
        device="cpu",
        seed=1,
        timeout_s=300,
    )
    specs = {role: load_spec(path) for role, path in model_paths(config).items()}
    actor, _, _ = build_roles(config, specs, context, total_optimizer_steps=100)
    network = actor.policy.network
    before = {n: t.clone() for n, t in export_hf(network.chunks, network.spec)}
    learning_rate = actor.trainable.lr
    actor.trainable.zero_grad()
    norm = actor.trainable.step()
    after = {n: t.clone() for n, t in export_hf(network.chunks, network.spec)}
    torch.save({"before": before, "after": after, "lr": learning_rate, "norm": norm}, out)
    parallel.stop(context)


if __name__ == "__main__":
    main()
