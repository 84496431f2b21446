"""SGLang plug-in that keeps a model's shapes on CPU as they are on CUDA.

SGLang rounds the widths of MLPs and the number of heads up for its compiled CPU kernels. With
PyTorch's kernels (`sglang_platform`) nothing needs that, and its loaders, which pad for those
kernels alone, would then read past the end of a weight: an engine of two processes does not start
where the model has one key-value head. Left as they are, widths are split evenly, and a key-value
head is repeated where there are more processes than heads, as on CUDA.
"""

from __future__ import annotations

from typing import Any


def _as_configured(model_config: Any, load_config: Any, tp_size: int) -> Any:
    """Stands in for `adjust_config_with_unaligned_cpu_tp`, whose names it keeps."""
    return model_config


def register() -> None:
    """Installs the hook; called by the plug-in of `sglang_seeds`, on CPU alone."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.adjust_config_with_unaligned_cpu_tp",
        _as_configured,
        HookType.REPLACE,
    )
