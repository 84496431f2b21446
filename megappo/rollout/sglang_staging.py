"""SGLang plug-in that makes the buckets of a weight push cheap for the engine, on CPU.

A bucket reaches the engine as shared memory. SGLang drops its mapping after each bucket, and
touching freshly mapped pages costs several times the copy that is to be made. Here the model keeps
a reference to the buffer of each slot (`staging`), of which there are two for the whole run, and
which cost the engine no memory of their own; a bucket in a slot that is mapped already comes
without one.

Before each bucket SGLang also looks through all modules for caches that an update would leave
stale. Its answer is fixed when the model is built, and is asked for once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"


def _keep_mapped(
    load: Callable[..., Any], updater: Any, flattened_tensor_bucket_dict: Mapping[str, Any]
) -> Any:
    """Wraps `WeightUpdater._update_weights_from_flattened_bucket`, whose names it keeps."""
    slots = vars(updater.get_model()).setdefault("megappo_staging", {})
    bucket = dict(flattened_tensor_bucket_dict)
    if bucket["flattened_tensor"] is None:
        bucket["flattened_tensor"] = slots[bucket["slot"]]
    else:
        slots[bucket["slot"]] = bucket["flattened_tensor"]
    return load(updater, flattened_tensor_bucket_dict=bucket)


def _ask_once(look: Callable[..., str | None], model: Any = None) -> str | None:
    """Wraps `_unsupported_derived_weight_cache_error(model)`."""
    if model is None:
        return look()
    known = vars(model)
    if "megappo_no_update" not in known:
        known["megappo_no_update"] = look(model)
    answer: str | None = known["megappo_no_update"]
    return answer


def register() -> None:
    """Installs the hooks; called by the plug-in of `sglang_seeds`, on CPU alone."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        f"{_UPDATER}.WeightUpdater._update_weights_from_flattened_bucket",
        _keep_mapped,
        HookType.AROUND,
    )
    HookRegistry.register(
        f"{_UPDATER}._unsupported_derived_weight_cache_error", _ask_once, HookType.AROUND
    )
