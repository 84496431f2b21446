"""SGLang plug-in that lets a request have both `min_p` and a seed.

SGLang refuses the two together, because probabilities would have to be normalised for the draw by a
seed. That draw is a Gumbel-max over log-probabilities, to which a common factor is nothing. So
tokens below the threshold get probability 0 here, before SGLang looks at top_k and top_p: they are
the least likely ones, so the sums over likelier tokens that top_p goes by stay what they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def _draw_above_min_p(
    draw: Callable[..., Any],
    probs: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    need_min_p_sampling: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wraps `top_k_top_p_min_p_sampling_from_probs_torch`, whose names it keeps.

    `probs` is [N, V]; `top_ks`, `top_ps` and `min_ps` are [N].
    """
    if need_min_p_sampling:
        least = min_ps[:, None] * probs.amax(dim=-1, keepdim=True)
        probs = probs.masked_fill(probs < least, 0.0)
    return draw(probs, top_ks, top_ps, min_ps, False, *args, **kwargs)


def register() -> None:
    """Installs the hook; called by the plug-in of `sglang_seeds`, on CPU and CUDA."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
        _draw_above_min_p,
        HookType.AROUND,
    )
