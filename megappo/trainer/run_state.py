"""What of a run's state is small and equal on all ranks: for checkpoints, and for roll-backs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megappo.checkpoint.compare import flatten, model_identity
from megappo.config import Config
from megappo.trainer.ppo_trainer import PPOTrainer


def progress(trainer: PPOTrainer) -> dict[str, Any]:
    """What each step changes and is not a tensor: its number, place in the data, KL controller."""
    return {
        "step": trainer.step_number,
        "sampler": trainer.sampler.state_dict(),
        "kl_controller": trainer.estimator.kl_controller.state_dict(),
    }


def load_progress(trainer: PPOTrainer, state: Mapping[str, Any]) -> None:
    """Takes up what `progress` gave."""
    trainer.sampler.load_state_dict(state["sampler"])
    trainer.estimator.kl_controller.load_state_dict(state["kl_controller"])
    trainer.step_number = int(state["step"])


def checkpoint_state(
    config: Config,
    trainer: PPOTrainer,
    train_files: Sequence[Mapping[str, Any]],
    base_weights: Mapping[str, Sequence[Mapping[str, Any]]],
) -> dict[str, Any]:
    """The small state of a checkpoint, equal on all ranks, as JSON values.

    Args:
        config: of the run.
        trainer: between two steps.
        train_files: of `file_identities`.
        base_weights: of the roles with adapters, of `file_identities`.
    """
    return {
        **progress(trainer),
        "guard": trainer.guard.state_dict() | {"adjustments": trainer.adjustments.state_dict()},
        "config": flatten(config),
        "train_files": list(train_files),
        "base_weights": {role: list(files) for role, files in base_weights.items()},
        "models": {
            role: model_identity(network.spec) for role, network in trainer.networks.items()
        },
    }
