"""Qwen3, dense: no biases, a norm on queries and keys, and a head dim of its own."""

from megappo.errors import ModelError
from megappo.models.families.base import (
    FAMILIES,
    ConfigJson,
    Family,
    refuse,
    refuse_windowed_layers,
)


def _check(config: ConfigJson) -> None:
    # Qwen3's own default is 128, not hidden_size / num_attention_heads.
    if config.get("head_dim") is None:
        raise ModelError("config.json lacks head_dim, which every Qwen3 model states")
    refuse(config, "attention_bias", "Qwen3's flag gives the output projection a bias too")
    refuse_windowed_layers(config)


FAMILIES.register("qwen3")(
    Family(
        qkv_bias=False,
        qk_norm=True,
        keys=frozenset(
            {
                "attention_bias",
                "use_sliding_window",
                "sliding_window",
                "max_window_layers",
                "layer_types",
            }
        ),
        check=_check,
    )
)
