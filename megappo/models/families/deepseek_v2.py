"""DeepSeek-V2 and V2-Lite: latent attention, shared experts, softmax routers."""

from typing import Any

from megappo.models.families.base import FAMILIES, ConfigJson, Family, refuse
from megappo.models.families.shared_experts import (
    EXPERT_KEYS,
    LATENT_KEYS,
    check_experts,
    check_latent,
    expert_fields,
    latent_fields,
)
from megappo.models.parts import RouterRule

_METHODS = ("greedy", "group_limited_greedy")


def _check(config: ConfigJson) -> None:
    check_latent(config)
    check_experts(config, score="softmax", methods=_METHODS)
    refuse(config, "norm_topk_prob", "transformers' DeepSeek-V2 never normalises")


def _fields(config: ConfigJson) -> dict[str, Any]:
    scale = float(config.get("routed_scaling_factor", 1.0))
    grouped = config.get("topk_method", "greedy") == "group_limited_greedy"
    rule = RouterRule(
        num_groups=int(config.get("n_group") or 1) if grouped else 1,
        groups_per_token=int(config.get("topk_group") or 1) if grouped else 1,
        scale=scale,
    )
    return latent_fields(config) | expert_fields(config, rule, normalized=False)


FAMILIES.register("deepseek_v2")(
    Family(
        qkv_bias=False,
        qk_norm=False,
        keys=EXPERT_KEYS | LATENT_KEYS,
        check=_check,
        kv_heads_default_to_heads=True,
        fields=_fields,
    )
)
