"""What DeepSeek-V2, DeepSeek-V3 and GLM-4.5 have in common: dense first layers, shared experts.

No family of its own. Layers for the prediction of several tokens (MTP), which follow the model's
layers in a folder, are neither trained nor written; `ModelSpec.dropped_layers` counts them.
"""

from typing import Any

from megappo.errors import ModelError
from megappo.models.families.base import ConfigJson, check_choice, refuse, require
from megappo.models.parts import Latent, RouterRule

EXPERT_KEYS = frozenset(
    {
        "n_routed_experts",
        "num_experts_per_tok",
        "n_shared_experts",
        "moe_intermediate_size",
        "first_k_dense_replace",
        "moe_layer_freq",
        "norm_topk_prob",
        "routed_scaling_factor",
        "n_group",
        "topk_group",
        "topk_method",
        "scoring_func",
        "num_nextn_predict_layers",
        # Transformers' own training loss, and how its code spreads experts.
        "aux_loss_alpha",
        "seq_aux",
        "router_aux_loss_coef",
        "output_router_logits",
        "ep_size",
        "pretraining_tp",
        "attention_bias",
    }
)
LATENT_KEYS = frozenset(
    {
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "qk_head_dim",
        "v_head_dim",
        "rope_interleave",
        "mlp_bias",
    }
)
_INNER_EPS = 1e-6
"""Of the norms on the small vectors in transformers, whatever rms_norm_eps is."""


def check_experts(config: ConfigJson, *, score: str, methods: tuple[str, ...]) -> None:
    """Raises for experts that would be computed differently.

    Args:
        config: The whole config.
        score: What the family's routers score with.
        methods: Values of `topk_method` that the family's code has.

    Raises:
        ModelError: with the key and its value.
    """
    require(config, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    require(config, "n_shared_experts")
    for key, wanted in (("scoring_func", (score,)), ("topk_method", methods)):
        if config.get(key, wanted[0]) not in wanted:
            raise ModelError(
                f"config.json sets {key}={config[key]!r}, which a {config['model_type']} model "
                f"does not have in transformers: it must be {' or '.join(wanted)}"
            )
    if config.get("moe_layer_freq", 1) != 1:
        raise ModelError(
            f"moe_layer_freq={config['moe_layer_freq']} is not supported: transformers reads "
            "first_k_dense_replace alone; only 1 is"
        )
    experts, chosen = config["n_routed_experts"], config["num_experts_per_tok"]
    check_choice(experts, chosen, normalized=bool(config.get("norm_topk_prob")))


def check_groups(experts: int, chosen: int, rule: RouterRule) -> None:
    """Raises when experts do not fill groups, or a token's groups have too few.

    Raises:
        ModelError: with the numbers.
    """
    groups, taken = rule.num_groups, rule.groups_per_token
    if groups < 1 or experts % groups or not 1 <= taken <= groups:
        raise ModelError(
            f"n_group={groups} must divide n_routed_experts={experts}, and topk_group={taken} "
            "must be between 1 and n_group"
        )
    size = experts // groups
    if chosen > taken * size or rule.best_of_group > size:
        raise ModelError(
            f"{taken} of {groups} groups of {size} experts have too few for "
            f"num_experts_per_tok={chosen}, or for a group's score, which adds up "
            f"{rule.best_of_group}: set other n_group and topk_group"
        )


def expert_fields(config: ConfigJson, rule: RouterRule, *, normalized: bool) -> dict[str, Any]:
    """Fields of a `ModelSpec` for experts after dense first layers."""
    layers, dense = config["num_hidden_layers"], config.get("first_k_dense_replace") or 0
    if not 0 <= dense < layers:
        raise ModelError(
            f"first_k_dense_replace={dense} leaves none of the {layers} layers with experts"
        )
    width = int(config["moe_intermediate_size"])
    check_groups(config["n_routed_experts"], config["num_experts_per_tok"], rule)
    return {
        "num_experts": int(config["n_routed_experts"]),
        "experts_per_token": int(config["num_experts_per_tok"]),
        "moe_ffn_hidden_size": width,
        "shared_ffn_hidden_size": width * int(config["n_shared_experts"]),
        "moe_layers": tuple(i >= dense for i in range(layers)),
        "norm_topk_prob": normalized,
        "router": rule,
        "dropped_layers": int(config.get("num_nextn_predict_layers") or 0),
    }


def biased_rule(config: ConfigJson) -> RouterRule:
    """DeepSeek-V3's rule (arXiv 2412.19437, section 2.1.2), which GLM-4.5 shares."""
    groups = int(config.get("n_group") or 1)
    return RouterRule(
        score="sigmoid",
        has_bias=True,
        num_groups=groups,
        groups_per_token=int(config.get("topk_group") or 1),
        # With one group its score does not matter.
        best_of_group=2 if groups > 1 else 1,
        scale=float(config.get("routed_scaling_factor", 1.0)),
    )


def check_latent(config: ConfigJson) -> None:
    """Raises for latent attention that would be computed differently.

    Raises:
        ModelError: with the key and its value.
    """
    refuse(config, "attention_bias", "latent attention is built without biases")
    refuse(config, "mlp_bias", "the MLP is built without biases")
    require(config, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if "q_lora_rank" not in config:
        raise ModelError("config.json lacks q_lora_rank; null means queries without one")
    if config.get("rope_interleave", True) is not True:
        raise ModelError("rope_interleave=false is not supported: Megatron rotates pairs of dims")
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise ModelError(
            f"latent attention has a key and a value for each query head: num_key_value_heads is "
            f"{kv_heads} and num_attention_heads {heads}"
        )
    if config["rms_norm_eps"] != _INNER_EPS:
        raise ModelError(
            f"rms_norm_eps={config['rms_norm_eps']} is not supported: transformers takes "
            f"{_INNER_EPS} in the norms within latent attention, SGLang and Megatron rms_norm_eps"
        )


def latent_fields(config: ConfigJson) -> dict[str, Any]:
    """Fields of a `ModelSpec` for latent attention."""
    rank = config["q_lora_rank"]
    latent = Latent(
        query_rank=None if rank is None else int(rank),
        key_value_rank=int(config["kv_lora_rank"]),
        plain_dim=int(config["qk_nope_head_dim"]),
        rotary_dim=int(config["qk_rope_head_dim"]),
        value_dim=int(config["v_head_dim"]),
    )
    return {
        "latent": latent,
        "head_dim": latent.head_dim,
        "num_kv_heads": config["num_attention_heads"],
    }
