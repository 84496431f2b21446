"""Trains two steps in a layout and saves: as a run does, as Megatron-LM does in its two formats,
and as the Hugging Face tensors that this run itself exports.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megappo.checkpoint.layout import KeepPolicy
from megappo.checkpoint.store import CheckpointStore
from megappo.distributed import parallel
from megappo.trainer.build import build_roles
from tests.distributed.workers.resume import minibatch, update
from tests.distributed.workers.start import start_worker
from tests.distributed.workers.update import export, share, whole_batch


def main() -> None:
    worker = start_worker()
    config, context, specs = worker.config, worker.context, worker.specs
    actor, critic, _ = build_roles(config, specs, context, total_optimizer_steps=9)
    roles = {"actor": actor, "critic": critic}
    mini = minibatch(roles, share(whole_batch(specs["actor"].vocab_size), context))
    for _ in range(2):  # the first step's learning rate is 0
        update(roles, mini)
    store = CheckpointStore(
        folder=worker.out / "checkpoints", policy=KeepPolicy(newest=1), context=context
    )
    store.save(7, {n: r.trainable for n, r in roles.items()}, {"note": 1})
    exported = {
        "actor": export(actor.policy.network, "lm"),
        "critic": export(critic.network, "value"),
    }
    if context.rank == 0:
        torch.save(exported, worker.out / "exported.pt")
    save_legacy(worker.out / "legacy", actor.trainable.chunks, context, specs["actor"])
    save_torch_dist(worker.out / "megatron_lm", actor.trainable.chunks, context)
    parallel.stop(context)


def save_torch_dist(root: Path, chunks: Any, context: Any) -> None:
    """What Megatron-LM writes by default: layers joined, and experts in the dim behind."""
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps

    folder = root / "iter_0000007"
    if context.rank == 0:
        folder.mkdir(parents=True)
        (root / "latest_checkpointed_iteration.txt").write_text("7")
    parallel.barrier(context)
    metadata = {"dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = {"args": argparse.Namespace(world_size=context.world_size)}
    for i, chunk in enumerate(chunks):
        # Ours is a list, one entry a layer; as a number Megatron may join layers that are alike.
        if all(layer.is_moe_layer for layer in chunk.module.decoder.layers):
            chunk.module.config.moe_layer_freq = 1
        key = "model" if len(chunks) == 1 else f"model{i}"
        state[key] = chunk.module.sharded_state_dict(metadata=metadata)
    dist_checkpointing.save(state, str(folder), content_metadata={"singleton_local_shards": False})


def save_legacy(root: Path, chunks: Any, context: Any, spec: Any) -> None:
    """What megatron/training/checkpointing.py of Megatron-LM writes with --ckpt-format torch."""
    from megatron.core import parallel_state as ps
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    if ps.get_data_parallel_rank() and not ps.get_expert_model_parallel_rank():
        return
    name = f"mp_rank_{context.tp_rank:02d}"
    if context.pp > 1:
        name += f"_{context.pp_rank:03d}"
    if context.ep > 1:
        name += f"_{ps.get_expert_model_parallel_rank():03d}"
    state: dict[str, Any] = {
        "args": argparse.Namespace(
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            tensor_model_parallel_size=context.tp,
            pipeline_model_parallel_size=context.pp,
            expert_model_parallel_size=context.ep,
            untie_embeddings_and_output_weights=not spec.tied,
            attention_backend=AttnBackend.unfused,
            model_type=ModelType.encoder_or_decoder,
            params_dtype=torch.float32,
            save=Path("somewhere"),
        ),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "rng_state": [
            {
                "random_rng_state": random.getstate(),
                "np_rng_state": np.random.get_state(),
                "torch_rng_state": torch.get_rng_state(),
            }
        ],
    }
    for i, chunk in enumerate(chunks):
        key = "model" if len(chunks) == 1 else f"model{i}"
        state[key] = chunk.module.state_dict_for_save_checkpoint()
    folder = root / "iter_0000007" / name
    folder.mkdir(parents=True)
    torch.save(state, folder / "model_optim_rng.pt")
    if context.rank == 0:
        (root / "latest_checkpointed_iteration.txt").write_text("7")


if __name__ == "__main__":
    main()
