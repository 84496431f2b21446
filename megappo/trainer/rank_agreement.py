"""Whether ranks still hold the same weights, as a step of the loop: metrics, or what differs."""

from __future__ import annotations

import time

from megappo.distributed.offload import on_device
from megappo.distributed.rank_check import compare_ranks
from megappo.errors import RanksDifferError
from megappo.trainer.ppo_trainer import PPOTrainer


def compare_roles(trainer: PPOTrainer, metrics: dict[str, float]) -> RanksDifferError | None:
    """Compares trained models, bit for bit. Collective over the world.

    Args:
        trainer: between two steps, not under `parallel.fsdp`.
        metrics: get `training/compared_tensors` and `timing_s/compare_ranks`.

    Returns:
        A difference, to be raised once the step is logged.
    """
    start = time.perf_counter()
    compared = 0
    for model in trainer.trainables.values():
        with on_device(model.memory, "params"):
            try:
                compared += compare_ranks(model.name, model.chunks, trainer.context)
            except RanksDifferError as error:
                return error
    metrics["training/compared_tensors"] = float(compared)
    metrics["timing_s/compare_ranks"] = time.perf_counter() - start
    return None
