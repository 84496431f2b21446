"""Mistral without sliding windows, which is version 0.2 of the 7B and later."""

from megappo.models.families.base import FAMILIES, ConfigJson, Family, refuse_sliding_window


def _check(config: ConfigJson) -> None:
    # Mistral's own default is a window of 4096 tokens, so an absent key is not an absent window.
    refuse_sliding_window(config, config.get("sliding_window", 4096))


FAMILIES.register("mistral")(
    Family(qkv_bias=False, qk_norm=False, keys=frozenset({"sliding_window"}), check=_check)
)
