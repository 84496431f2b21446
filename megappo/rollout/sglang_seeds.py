"""SGLang plug-in that honours a request's `sampling_seed` on CPU.

SGLang reads the seed only in its deterministic mode, which refuses the CPU's attention backend.
This plug-in fills the seeds in, and replaces the function that draws the token: SGLang's own one
hashes with a Triton kernel, which needs a GPU.

A token is drawn by the Gumbel-max trick (Gumbel 1954; Maddison 2014, "A* sampling"):
argmax_v(log p_v + g_v) with g_v = -log(-log u_v) is distributed as p. Here u_v is a pure function
of (seed, position, v). So a sample depends on its own logits alone: not on the batch that it
shares, the order of requests, or a restart.

SGLang's processes find `register` by the entry point `sglang.srt.plugins` of setup.py. Where CUDA
is available the engine runs SGLang's deterministic mode, and needs no hook but that for `min_p`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megappo.rollout import (
    sglang_attention,
    sglang_min_p,
    sglang_orphans,
    sglang_shapes,
    sglang_staging,
)

if TYPE_CHECKING:
    from torch import Tensor

SEED_WITHOUT_REQUEST = 0
"""Seed of requests that bring none (SGLang's own health checks and warm-up)."""

# Odd Weyl increments, then the finaliser of splitmix64 (Steele, Lea, Flood 2014); as signed int64.
_SEED_STEP = -7046029254386353131  # 0x9E3779B97F4A7C15
_POSITION_STEP = -3335678366873096957  # 0xD1B54A32D192ED03
_TOKEN_STEP = -6068174398545744893  # 0xABC98388FB8FAC03
_FINALISER = ((30, -4658895280553007687), (27, -7723592293110705685))


def uniform_noise(seeds: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """Independent uniform numbers in (0, 1), a pure function of (seed, position, token).

    Args:
        seeds: [N] int64, one a request.
        positions: [N] integer, position in its sequence of the token to draw.
        num_tokens: V, the vocabulary.

    Returns:
        [N, V] float64.
    """
    import torch

    tokens = torch.arange(num_tokens, dtype=torch.int64, device=seeds.device)
    rows = _mix(seeds.to(torch.int64) * _SEED_STEP + positions.to(torch.int64) * _POSITION_STEP)
    bits = _mix(rows[:, None] + tokens * _TOKEN_STEP)
    # The upper 53 bits, at the middle of their interval: never 0 or 1, so the double log is finite.
    return (_shift_right(bits, 11).to(torch.float64) + 0.5) * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64, where products wrap as they do on uint64."""
    for shift, factor in _FINALISER:
        x = (x ^ _shift_right(x, shift)) * factor
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, shift: int) -> Tensor:
    """Logical shift: int64's own would repeat the sign bit."""
    return (x >> shift) & ((1 << (64 - shift)) - 1)


def draw_tokens(logprobs: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """Draws one token a row; stands in for SGLang's `multinomial_with_seed`, whose names it keeps.

    Args:
        logprobs: [N, V] log-probabilities, -inf where filtered out; need not be normalised.
        seed: [N] int64.
        positions: [N] integer.

    Returns:
        [N, 1] int64 column of each draw.
    """
    import torch

    gumbel = uniform_noise(seed, positions, logprobs.shape[1]).log_().neg_().log_().neg_()
    return torch.argmax(gumbel.add_(logprobs), dim=1, keepdim=True)


def _with_seeds(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `SamplingBatchInfo.from_schedule_batch(cls, batch, vocab_size)`: adds the seeds."""
    import torch

    info = build(*args, **kwargs)
    batch = kwargs["batch"] if "batch" in kwargs else args[1]
    given = [request.sampling_params.sampling_seed for request in batch.reqs]
    info.sampling_seed = torch.tensor(
        [SEED_WITHOUT_REQUEST if seed is None else seed for seed in given],
        dtype=torch.int64,
        device=info.device,
    )
    return info


def register() -> None:
    """Ties this process to its parent and installs the CPU's hooks; SGLang calls it in each."""
    import torch

    sglang_orphans.end_with_parent()
    sglang_min_p.register()
    if torch.cuda.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
        _with_seeds,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.layers.sampler.multinomial_with_seed", draw_tokens, HookType.REPLACE
    )
    sglang_attention.register()
    sglang_shapes.register()
    sglang_staging.register()
