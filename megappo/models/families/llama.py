"""Llama 1 to 3.x, and models that reuse its `model_type` (SmolLM2, TinyLlama, Yi)."""

from megappo.models.families.base import FAMILIES, ConfigJson, Family, refuse


def _check(config: ConfigJson) -> None:
    refuse(config, "attention_bias", "Llama's flag gives the output projection a bias too")
    refuse(config, "mlp_bias", "the MLP is built without biases")


# pretraining_tp splits the same matrix products and changes no result.
FAMILIES.register("llama")(
    Family(
        qkv_bias=False,
        qk_norm=False,
        keys=frozenset({"attention_bias", "mlp_bias", "pretraining_tp"}),
        check=_check,
        kv_heads_default_to_heads=True,
    )
)
