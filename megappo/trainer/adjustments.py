"""What guards have changed of a run's settings: kept in checkpoints, not undone by a roll-back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Adjustments:
    """All as configured until a guard acts: then a run differs in nothing else."""

    kl_factor: float = 1.0
    """Times the KL coefficients in reward and loss."""
    sampling_salt: int = 0
    """Roll-backs so far; part of every training seed from 1 on."""
    lr_limits: dict[str, float] = field(default_factory=dict)
    """Highest learning rate, by role."""
    halvings: int = 0
    """How often micro-batches were halved."""
    offloads_all: bool = False
    """Whether weights, gradients and optimizer state of actor and critic leave the device."""

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "kl_factor": self.kl_factor,
            "sampling_salt": self.sampling_salt,
            "lr_limits": dict(self.lr_limits),
            "halvings": self.halvings,
            "offloads_all": self.offloads_all,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Adjustments:
        """From a checkpoint's `state_dict`."""
        return cls(**state)
