"""Qwen2 and Qwen2.5, dense."""

from megappo.models.families.base import FAMILIES, Family, refuse_windowed_layers

FAMILIES.register("qwen2")(
    Family(
        qkv_bias=True,
        qk_norm=False,
        keys=frozenset(
            {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
        ),
        check=refuse_windowed_layers,
    )
)
