"""PPO updates of adapters on fixed samples in one layout; writes what came out."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

from megappo.checkpoint.snapshot import Snapshot
from megappo.config import Config, load
from megappo.distributed import parallel
from megappo.distributed.metrics import Tally
from megappo.distributed.offload import inner_optimizers, on_device
from megappo.distributed.rank_check import compare_ranks
from megappo.models.hf_export import save_hf
from megappo.models.lora import adapters, dropping, is_adapter_name
from megappo.models.lora_export import save_peft
from megappo.models.spec import load_spec
from megappo.models.weights import named_weights
from megappo.trainer.build import build_roles
from megappo.trainer.preflight import model_paths
from megappo.types import MiniBatch
from tests.distributed.launch import free_port
from tests.distributed.workers.resume import minibatch
from tests.distributed.workers.update import export, share, whole_batch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("layouts", help='JSON: {name: ["key=value", ...]}')
    arguments = parser.parse_args()
    launch = parallel.LaunchEnvironment.read()
    for name, overrides in json.loads(arguments.layouts).items():
        config = load(arguments.config, overrides)
        degrees = parallel.Degrees.of(config.parallel)
        context = parallel.start(launch, degrees, device="cpu", seed=1, timeout_s=300)
        out = arguments.out / name
        out.mkdir(exist_ok=True)
        drops = config.actor.lora.dropout > 0
        found = run_dropped(config, context) if drops else run_layout(config, context, out)
        torch.save(found, out / f"rank{context.rank}.pt")
        # Another port for the next groups: a rank must not meet the store of these.
        ports = parallel.all_gather_objects(free_port(), context.world_group)
        parallel.stop(context)
        os.environ["MASTER_PORT"] = str(ports[0])


def run_layout(config: Config, context: parallel.ParallelContext, out: Path) -> dict[str, Any]:
    paths = model_paths(config)
    specs = {role: load_spec(path) for role, path in paths.items()}
    spec = specs["actor"]
    actor, critic, reference = build_roles(config, specs, context, total_optimizer_steps=9)
    assert reference is not None
    roles: dict[str, Any] = {"actor": actor, "critic": critic}
    chunks = actor.trainable.chunks
    batch = share(whole_batch(spec.vocab_size), context)
    mini = minibatch(roles, batch)
    passes = [list(rows) for rows in mini.micro_batches]
    with on_device(actor.trainable.memory, "params"):
        frozen = {name: weight.clone() for name, weight in named_weights(chunks, spec)}
    norms = update(roles, mini)
    snapshot = Snapshot(models={name: role.trainable for name, role in roles.items()})
    snapshot.take({})
    norms += update(roles, mini) + update(roles, mini)
    snapshot.restore()
    norms_again = update(roles, mini) + update(roles, mini)
    for name, role in roles.items():
        role.trainable.memory.load()
        compare_ranks(name, role.trainable.chunks, context)
    save_peft(chunks, spec, config.actor.lora, out / "peft", base=paths["actor"])
    save_hf(chunks, spec, paths["actor"], out / "merged")
    return {
        "norms": norms,
        "norms_again": norms_again,
        "old": mini.samples.old_log_probs,
        "new": actor.log_probs(batch, passes)[0],
        "reference": reference.log_probs(batch, passes)[0],
        "weights": export(actor.policy.network, "lm"),
        "frozen_moved": [
            n for n, w in named_weights(chunks, spec) if not torch.equal(w, frozen[n])
        ],
        "trained": [n for c in chunks for n, p in c.module.named_parameters() if p.requires_grad],
        "optimizer_elements": {name: elements(role.trainable) for name, role in roles.items()},
        "adapter_elements": {
            name: adapter_elements(role.trainable) for name, role in roles.items()
        },
    }


def run_dropped(config: Config, context: parallel.ParallelContext) -> dict[str, Any]:
    """Two updates with dropout, and what there is without it."""
    specs = {role: load_spec(path) for role, path in model_paths(config).items()}
    actor, critic, _ = build_roles(config, specs, context, total_optimizer_steps=9)
    roles: dict[str, Any] = {"actor": actor, "critic": critic}
    batch = share(whole_batch(specs["actor"].vocab_size), context)
    mini = minibatch(roles, batch)
    passes = [list(rows) for rows in mini.micro_batches]
    norms = update(roles, mini) + update(roles, mini)
    for name, role in roles.items():
        compare_ranks(name, role.trainable.chunks, context)
    weights = {name: weight.clone() for name, weight in export(actor.policy.network, "lm").items()}
    with dropping(actor.trainable.chunks):
        exported = dict(export(actor.policy.network, "lm"))
    return {
        "norms": norms,
        "old": mini.samples.old_log_probs,
        "new": [actor.log_probs(batch, passes)[0] for _ in range(2)],
        "weights": weights,
        "exported_while_dropping": exported,
        "masks": masks(actor.trainable.chunks),
    }


def update(roles: dict[str, Any], mini: MiniBatch) -> list[float]:
    norms = []
    with on_device(roles["critic"].trainable.memory):
        norms.append(roles["critic"].update(mini, Tally()))
    with on_device(roles["actor"].trainable.memory):
        norms.append(roles["actor"].update(mini, Tally(), is_first=False))
    return norms


def masks(chunks: Any) -> dict[str, torch.Tensor]:
    """What each adapter's dropout makes of ones, [64, 1, 64]."""
    return {
        name: adapter._drop(torch.ones(64, 1, 64))
        for chunk in chunks
        for name, adapter in adapters(chunk.module)
    }


def elements(trainable: Any) -> int:
    """Main weights that this rank's optimizers update."""
    return sum(
        p.numel()
        for optimizer in inner_optimizers(trainable.optimizer)
        for group in optimizer.param_groups
        for p in group["params"]
    )


def adapter_elements(trainable: Any) -> int:
    return sum(
        p.numel()
        for chunk in trainable.chunks
        for name, p in chunk.module.named_parameters()
        if is_adapter_name(name)
    )


if __name__ == "__main__":
    main()
