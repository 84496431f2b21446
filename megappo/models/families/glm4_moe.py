"""GLM-4.5 and 4.6: half of each head is rotated, shared experts, DeepSeek-V3's routers.

The bias of the routers is kept as it is in the folder. Left out: GLM-4.5V, which sees images.
"""

from typing import Any

from megappo.models.families.base import FAMILIES, ConfigJson, Family
from megappo.models.families.shared_experts import (
    EXPERT_KEYS,
    biased_rule,
    check_experts,
    expert_fields,
)


def _check(config: ConfigJson) -> None:
    check_experts(config, score="sigmoid", methods=("noaux_tc",))


def _fields(config: ConfigJson) -> dict[str, Any]:
    normalized = bool(config.get("norm_topk_prob", True))
    return {
        "qkv_bias": bool(config.get("attention_bias", False)),
        "qk_norm": bool(config.get("use_qk_norm", False)),
    } | expert_fields(config, biased_rule(config), normalized=normalized)


FAMILIES.register("glm4_moe")(
    Family(
        qkv_bias=False,
        qk_norm=False,
        keys=EXPERT_KEYS | {"use_qk_norm"},
        check=_check,
        fields=_fields,
        rotary_fraction=0.5,
    )
)
