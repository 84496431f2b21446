"""Decode attention of SGLang's `torch_native` backend over all sequences at once.

The backend calls PyTorch's attention once a sequence, layer and token, which for a small model is
nearly all of the time. While sequences are short it is five times as fast to pad their keys to the
longest one and call it once. Long sequences keep SGLang's loop: there the padding costs more than
the calls. Both give the same attention to 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

MAX_PADDED_TOKENS = 256
"""Longest sequence that is padded; measured on two cores, 64 to 256 sequences."""

_TARGET = (
    "sglang.srt.layers.attention.torch_native_backend"
    ".TorchNativeAttnBackend._run_sdpa_forward_decode"
)


def padded_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    token_slots: Tensor,
    lengths: Tensor,
    scaling: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Attention of one new token a sequence to all tokens of its sequence.

    Args:
        query: [N, H, D], one token of each of N sequences.
        k_cache: [S, G, D], keys of all sequences; G divides H.
        v_cache: [S, G, D].
        token_slots: [N, >= max(lengths)], where a sequence's tokens lie in the cache.
        lengths: [N] tokens of each sequence, the new one included.
        scaling: of the scores; None is 1 / sqrt(D).
        enable_gqa: G < H.

    Returns:
        [N, H, D]
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    longest = int(lengths.max())
    real = torch.arange(longest, device=lengths.device) < lengths[:, None]
    # Slots beyond a sequence's end hold anything; slot 0 is SGLang's own dummy.
    slots = torch.where(real, token_slots[:, :longest], 0)
    return scaled_dot_product_attention(
        query[:, :, None],
        k_cache[slots].transpose(1, 2).to(query.dtype),
        v_cache[slots].transpose(1, 2).to(query.dtype),
        attn_mask=real[:, None, None],
        scale=scaling,
        enable_gqa=enable_gqa,
    )[:, :, 0]


def _decode(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Wraps `_run_sdpa_forward_decode`: ours for plain, short sequences, else the original."""
    _, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder = args
    plain = encoder is None and options["sliding_window_size"] is None
    if not plain or int(seq_lens.max()) > MAX_PADDED_TOKENS:
        return original(*args, **options)
    output.copy_(
        padded_decode(
            query,
            k_cache,
            v_cache,
            token_slots=req_to_token[req_pool_indices],
            lengths=seq_lens,
            scaling=options["scaling"],
            enable_gqa=options["enable_gqa"],
        )
    )
    return output


def register() -> None:
    """Installs the hook in this process; `sglang_seeds.register` calls it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_TARGET, _decode, HookType.AROUND)
