"""Draws tokens from logits, each draw decided by its request's seed alone.

Legend: n requests, V vocabulary; log-probs in nats.

The k-th token of a request takes the uniform number that a hash makes of (seed, k), and inverts the
cumulative distribution at it: no generator is kept, and neither the batch nor its order matters.
The kept set is SGLang's: the top k, of these the smallest set with probability of at least top_p
*over the whole vocabulary*, and at least min_p of the likeliest. The draws are not SGLang's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from megappo.rollout.sampling import SamplingSettings

_BITS = 48
"""Of a uniform number: few enough that it times a float64 sum stays below the sum."""


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides the token at `position` of the response with this seed."""
    digest = hashlib.blake2b(f"{seed},{position}".encode(), digest_size=_BITS // 8).digest()
    return int.from_bytes(digest, "big") / 2.0**_BITS


def draw(
    logits: Tensor, sampling: Sequence[SamplingSettings], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """One token a request.

    Args:
        logits: [n, V], without padding of the vocabulary.
        sampling: [n] temperature 0 takes the likeliest token.
        uniforms: [n] from `uniform`.

    Returns:
        Token ids [n], and their log-probs [n] under softmax(logits / temperature) over the whole
        vocabulary, at temperature 1 where greedy; float32.

    Raises:
        RuntimeError: a logit is NaN or infinite.
    """
    logits = logits.float()
    if not logits.isfinite().all():
        raise RuntimeError("the model's logits are not finite: its weights or activations overflow")
    temperatures = logits.new_tensor([s.temperature or 1.0 for s in sampling])
    log_probs = (logits / temperatures[:, None]).log_softmax(-1)
    tokens = logits.argmax(-1)
    sampled = [i for i, s in enumerate(sampling) if s.temperature > 0]
    if sampled:
        kept = _kept(log_probs[sampled].exp(), [sampling[i] for i in sampled])
        tokens[sampled] = _invert(kept, [uniforms[i] for i in sampled])
    of_tokens = log_probs.gather(-1, tokens[:, None])[:, 0]
    return tokens.tolist(), of_tokens.tolist()


def _kept(probabilities: Tensor, sampling: Sequence[SamplingSettings]) -> Tensor:
    """[n, V] probabilities, 0 for tokens that `sampling` leaves out."""
    if not any(s.truncates for s in sampling):
        return probabilities
    size = probabilities.shape[-1]
    top_k = [s.top_k if s.top_k > 0 else size for s in sampling]
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.double().cumsum(-1) - ordered
    rank = torch.arange(size, device=ordered.device)
    keep = (
        (rank < probabilities.new_tensor(top_k)[:, None])
        & (before <= before.new_tensor([s.top_p for s in sampling])[:, None])
        & (ordered >= ordered.new_tensor([s.min_p for s in sampling])[:, None] * ordered[:, :1])
    )
    return torch.zeros_like(probabilities).scatter(-1, order, ordered.where(keep, 0.0))


def _invert(weights: Tensor, uniforms: Sequence[float]) -> Tensor:
    """[n] first column whose cumulative share of [n, V] `weights` exceeds the uniform number."""
    cumulative = weights.double().cumsum(-1)
    wanted = cumulative.new_tensor(uniforms)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, wanted, right=True)[:, 0]
