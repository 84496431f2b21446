"""Mixtral: Mistral's attention, and experts in every layer.

The weights of a token's experts are always normalised; the config has no switch for it. Its
intermediate_size is that of one expert.
"""

from typing import Any

from megappo.models.families.base import (
    FAMILIES,
    ConfigJson,
    Family,
    check_choice,
    refuse_sliding_window,
    require,
)
from megappo.models.parts import ExpertNames


def _check(config: ConfigJson) -> None:
    # Mixtral's own default is no window, unlike Mistral's.
    refuse_sliding_window(config, config.get("sliding_window"))
    require(config, "num_local_experts", "num_experts_per_tok")
    check_choice(config["num_local_experts"], config["num_experts_per_tok"], normalized=True)


def _fields(config: ConfigJson) -> dict[str, Any]:
    return {
        "num_experts": int(config["num_local_experts"]),
        "experts_per_token": int(config["num_experts_per_tok"]),
        "moe_ffn_hidden_size": int(config["intermediate_size"]),
        "moe_layers": (True,) * config["num_hidden_layers"],
        "norm_topk_prob": True,
        "expert_names": ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    }


# The last three steer transformers' own training: its loss, and noise on the router's input.
FAMILIES.register("mixtral")(
    Family(
        qkv_bias=False,
        qk_norm=False,
        keys=frozenset(
            {
                "sliding_window",
                "num_local_experts",
                "num_experts_per_tok",
                "router_aux_loss_coef",
                "output_router_logits",
                "router_jitter_noise",
            }
        ),
        check=_check,
        fields=_fields,
        default_theta=1e6,
    )
)
