"""Qwen3 with a mixture of experts: Qwen3's attention, and experts in place of most MLPs.

Left out: shared experts, which no model of this family has, and Qwen2-MoE, which has them.
"""

from typing import Any

from megappo.errors import ModelError
from megappo.models.families.base import (
    FAMILIES,
    ConfigJson,
    Family,
    check_choice,
    refuse,
    refuse_sliding_window,
)

_NEEDED = ("num_experts_per_tok", "moe_intermediate_size")


def _check(config: ConfigJson) -> None:
    refuse(config, "attention_bias", "Qwen3's flag gives the output projection a bias too")
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise ModelError(
            f"layer_types has {', '.join(sorted(kinds))}; only full_attention is supported: "
            "use a model without sliding windows"
        )
    # Unlike the dense Qwen3's, this window covers every layer: max_window_layers is not read.
    if config.get("use_sliding_window"):
        refuse_sliding_window(config, config.get("sliding_window", 4096))
    _check_experts(config)


def _check_experts(config: ConfigJson) -> None:
    counts = {config[key] for key in ("num_experts", "num_local_experts") if config.get(key)}
    missing = [key for key in _NEEDED if not config.get(key)]
    if not counts:
        missing.append("num_experts")
    if missing:
        raise ModelError(f"config.json lacks {', '.join(missing)}")
    if len(counts) > 1:
        raise ModelError(
            "config.json gives the number of experts twice and differently: num_experts="
            f"{config['num_experts']}, num_local_experts={config['num_local_experts']}; keep one"
        )
    normalized = bool(config.get("norm_topk_prob"))
    check_choice(counts.pop(), config["num_experts_per_tok"], normalized=normalized)
    step = config.get("decoder_sparse_step", 1)
    if step < 1:
        raise ModelError(f"decoder_sparse_step must be at least 1, not {step}")


def _fields(config: ConfigJson) -> dict[str, Any]:
    dense = set(config.get("mlp_only_layers") or ())
    step = config.get("decoder_sparse_step", 1)
    layers = range(config["num_hidden_layers"])
    moe_layers = tuple(i not in dense and (i + 1) % step == 0 for i in layers)
    if not any(moe_layers):
        raise ModelError(
            f"mlp_only_layers={sorted(dense)} and decoder_sparse_step={step} leave none of the "
            f"{len(layers)} layers with experts; use the dense family's model_type"
        )
    return {
        # transformers 5 writes the second name.
        "num_experts": int(config.get("num_experts") or config["num_local_experts"]),
        "experts_per_token": int(config["num_experts_per_tok"]),
        "moe_ffn_hidden_size": int(config["moe_intermediate_size"]),
        "moe_layers": moe_layers,
        "norm_topk_prob": bool(config.get("norm_topk_prob", False)),
    }


# The last two steer transformers' own training loss; the trainer has a coefficient of its own.
FAMILIES.register("qwen3_moe")(
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
                "num_experts",
                "num_local_experts",
                "num_experts_per_tok",
                "moe_intermediate_size",
                "norm_topk_prob",
                "decoder_sparse_step",
                "mlp_only_layers",
                "router_aux_loss_coef",
                "output_router_logits",
            }
        ),
        check=_check,
        fields=_fields,
    )
)
