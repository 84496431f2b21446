"""SGLang plug-in that serves `device="cpu"` with PyTorch's own kernels.

SGLang's CPU path wants a compiled kernel package for Intel AMX. A platform of the kind "out of
tree" makes every fused operator fall back to its reference implementation in PyTorch instead,
which is slow, needs nothing installed, and gives the log-probs of transformers to 1e-5 in fp32.

SGLang's processes find `activate` by the entry point `sglang.srt.platforms` of setup.py. Left out:
CUDA, where SGLang's own platform is right and this one stays inactive.
"""

from __future__ import annotations

import gc

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class CpuReferencePlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """The CPU without compiled kernels, as SGLang's platform interface describes a device."""

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        """PyTorch's scaled dot product attention, one sequence at a time."""
        return "torch_native"

    def empty_cache(self) -> None:
        """Collects young garbage: what a push or a flush left behind.

        SGLang's own collects all of it, 0.4 s of CPU for each flush.
        """
        gc.collect(1)

    def is_pin_memory_available(self, device: object = None) -> bool:
        """Pinned memory is for copies to a GPU, and there is none."""
        return False


def activate() -> str | None:
    """The platform's qualified name for SGLang to load, or None where there is a CUDA device."""
    if torch.cuda.is_available():
        return None
    return f"{__name__}.{CpuReferencePlatform.__name__}"
