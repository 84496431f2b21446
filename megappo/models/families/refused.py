"""Families that are asked for and refused, with the reason: what Megatron-Core 0.16.1 lacks.

Its layers have one norm before attention and one before the MLP and none after them, its models
have one set of RoPE angles for all layers and take embeddings as they are, nothing caps logits, and
a norm that multiplies by 1 + weight exists for CUDA alone.
"""

_SANDWICH = "norms after attention and after the MLP"

REFUSED = {
    "gemma": (
        "Megatron-Core 0.16.1 does not scale embeddings, and multiplies by 1 + weight in norms "
        "on CUDA alone"
    ),
    "gemma2": (
        f"Megatron-Core 0.16.1 has no {_SANDWICH}, and no caps on attention scores and logits "
        "(attn_logit_softcapping, final_logit_softcapping)"
    ),
    "gemma3": "it sees images; and Megatron-Core 0.16.1 lacks what gemma3_text needs",
    "gemma3_text": (
        f"Megatron-Core 0.16.1 has no {_SANDWICH}, and one RoPE base for all layers where this "
        "family's windowed layers have another than the full ones"
    ),
}
"""By `model_type`."""
