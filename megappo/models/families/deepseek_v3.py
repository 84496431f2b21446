"""DeepSeek-V3 and R1: latent attention, shared experts, sigmoid routers with a bias and groups.

The bias, which pretraining moves to balance the load, is kept as it is in the folder.
"""

from typing import Any

from megappo.models.families.base import FAMILIES, ConfigJson, Family
from megappo.models.families.shared_experts import (
    EXPERT_KEYS,
    LATENT_KEYS,
    biased_rule,
    check_experts,
    check_latent,
    expert_fields,
    latent_fields,
)


def _check(config: ConfigJson) -> None:
    check_latent(config)
    check_experts(config, score="sigmoid", methods=("noaux_tc",))


def _fields(config: ConfigJson) -> dict[str, Any]:
    normalized = bool(config.get("norm_topk_prob", True))
    experts = expert_fields(config, biased_rule(config), normalized=normalized)
    return latent_fields(config) | experts


FAMILIES.register("deepseek_v3")(
    Family(
        qkv_bias=False,
        qk_norm=False,
        keys=EXPERT_KEYS | LATENT_KEYS,
        check=_check,
        kv_heads_default_to_heads=True,
        fields=_fields,
    )
)
