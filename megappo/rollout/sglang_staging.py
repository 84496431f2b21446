"""SGLang plug-in that keeps the trainer's staging buffer mapped between buckets of a weight push.

On CPU a bucket reaches the engine as shared memory. SGLang drops its mapping after each bucket, and
touching freshly mapped pages costs several times the copy that is to be made. PyTorch finds a
mapping that is still alive by its inode and uses it again; so here the model keeps a reference to
the last buffer, which is one for the whole run (`weight_update.Staging`) and costs the engine no
memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def _keep_mapped(
    load: Callable[..., Any], updater: Any, flattened_tensor_bucket_dict: Mapping[str, Any]
) -> Any:
    """Wraps `WeightUpdater._update_weights_from_flattened_bucket`, whose names it keeps."""
    updater.get_model().megappo_staging = flattened_tensor_bucket_dict["flattened_tensor"]
    return load(updater, flattened_tensor_bucket_dict=flattened_tensor_bucket_dict)


def register() -> None:
    """Installs the hook; called by the plug-in of `sglang_seeds`, on CPU alone."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater."
        "_update_weights_from_flattened_bucket",
        _keep_mapped,
        HookType.AROUND,
    )
