"""How much of the devices' arithmetic the updates use: `perf/tflops/ROLE` and `perf/mfu/ROLE`.

Model operations of the samples that updates passed over, in each epoch (`planner/flops.py`: three
forward passes a sample, recomputation and padding not counted) over the time of the role's update
phase. MFU (Chowdhery et al. 2022, arXiv 2204.02311, appendix B) divides by the device's peak. Left
out: the passes for log-probs and values, and generation. With LoRA gradients of frozen weights are
counted though they are not computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megappo.config import Config, SupervisedConfig
from megappo.distributed.metrics import Tally
from megappo.models.spec import ModelSpec
from megappo.planner.constants import TERA, gpu_of_device
from megappo.planner.flops import Head, mfu, train_flops

HEADS: Mapping[str, Head] = {"actor": "lm", "critic": "value", "rm": "value", "sft": "lm"}


@dataclass(frozen=True, kw_only=True)
class Utilization:
    """Figures of the roles that are trained."""

    specs: Mapping[str, ModelSpec]
    """role -> its model"""
    peak_flops_per_s: float | None
    """of a rank's device; None where it is not known, and there is no MFU then"""

    def add(self, tally: Tally, lengths: Mapping[str, Sequence[int]]) -> None:
        """Adds one rank's operations.

        Args:
            tally: of this rank.
            lengths: role -> tokens of the samples it passed over, once for each time; none on a
                rank whose samples another one reports.
        """
        for role, spec in self.specs.items():
            flops = train_flops(spec, lengths.get(role, ()), head=HEADS[role])
            tally.add(f"perf/flops/{role}", flops, 1)

    def finish(
        self, reduced: dict[str, float], *, seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Metrics of a step; takes what `add` left in `reduced`.

        Args:
            reduced: means over ranks.
            seconds: role -> time of its updates, for the roles that the step has trained.
        """
        found = {}
        for role in self.specs:
            flops = reduced.pop(f"perf/flops/{role}")
            took = seconds.get(role)
            if not took:
                continue
            found[f"perf/tflops/{role}"] = flops / took / TERA
            if self.peak_flops_per_s is not None:
                found[f"perf/mfu/{role}"] = mfu(
                    flops, seconds=took, num_devices=1, peak_flops_per_s=self.peak_flops_per_s
                )
        return found


def peak_flops_per_s(config: Config | SupervisedConfig, device: torch.device) -> float | None:
    """`trainer.device_peak_tflops`, or the datasheet's for bfloat16 on a device that is listed."""
    if config.trainer.device_peak_tflops:
        return config.trainer.device_peak_tflops * TERA
    if device.type != "cuda" or config.model.dtype != "bfloat16":
        return None
    gpu = gpu_of_device(torch.cuda.get_device_name(device))
    return None if gpu is None else gpu.flops_per_s
