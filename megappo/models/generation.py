"""Forward passes over growing sequences with a key-value cache: the model part of generation.

Legend: N sequences, n of them in one pass, S new tokens of the pass, L longest sequence so far,
C positions of the cache, h query heads and g key heads on this rank, d head dim, H hidden size, V
padded vocabulary.

The chunk is the trained one and keeps its parameters. While a `CachedDecoder` is open, a cache
stands in place of each layer's core attention, which has no parameters either. All new tokens of a
pass stand end to end in one row [S, 1, H], each with its own RoPE angles, so Megatron's layers run
as in training, under TP and sequence parallelism too; only the attention knows which token belongs
to which sequence. Latent attention makes its angles itself, so `PlacedAngles` stand in place of
that too, and its cache holds the projected keys and values, not the small vectors. Left out:
pipeline and context parallelism, paged caches, and prompts of which some part is computed already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from megappo.models.build import rotary_embeddings

PREFILL_TOKENS = 4096
"""Prompt tokens of one pass, padding included, unless one prompt alone is longer."""


@dataclass(frozen=True, kw_only=True)
class NewTokens:
    """The tokens of one pass and their places."""

    batch: Tensor
    """[n] sequences that grow."""
    rows: Tensor
    """[S] which of the n each token belongs to."""
    offsets: Tensor
    """[S] number of the token among the new ones of its sequence."""
    positions: Tensor
    """[S] position in the sequence."""
    last: Tensor
    """[n] index into S of each sequence's last token."""
    longest_new: int
    longest: int
    """L, the new tokens included."""
    visible: Tensor | None
    """[n, 1, longest_new, L] bool, what each query sees; None where all sequences start here."""

    @classmethod
    def of(
        cls, sequences: Sequence[int], starts: Sequence[int], counts: Sequence[int], device: Any
    ) -> NewTokens:
        """Places `counts` [n] tokens after the `starts` [n] that the cache has of `sequences`."""
        count = torch.tensor(counts)
        start = torch.tensor(starts)
        rows = torch.repeat_interleave(torch.arange(len(counts)), count)
        ends = count.cumsum(0)
        offsets = torch.arange(len(rows)) - (ends - count)[rows]
        longest_new, longest = int(count.max()), int((start + count).max())
        visible = None
        if start.any():
            queries = start[:, None] + torch.arange(longest_new)
            visible = (torch.arange(longest) <= queries[..., None])[:, None].to(device)
        return cls(
            batch=torch.tensor(sequences).to(device),
            rows=rows.to(device),
            offsets=offsets.to(device),
            positions=(start[rows] + offsets).to(device),
            last=(ends - 1).to(device),
            longest_new=longest_new,
            longest=longest,
            visible=visible,
        )


class CachedAttention(torch.nn.Module):  # type: ignore[misc]
    """Core attention of one layer, which writes new keys to its cache and reads all of them."""

    def __init__(self, *, num_sequences: int, capacity: int, softmax_scale: float | None) -> None:
        super().__init__()
        self.num_sequences = num_sequences
        self.capacity = capacity
        self.softmax_scale = softmax_scale
        self.new: NewTokens | None = None
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **unused: Any
    ) -> Tensor:
        """Attends causally within each sequence.

        Args:
            query: [S, 1, h, d]; rows past the pass's tokens are padding.
            key: [S, 1, g, d]
            value: [S, 1, g, dims of a value], which are d but in latent attention.
            attention_mask: None; the mask is causal.
            unused: What Megatron passes to every core attention.

        Returns:
            [S, 1, h x dims of a value], 0 where padding.
        """
        new = self.new
        assert new is not None, "a pass starts with CachedDecoder.extend"
        count = len(new.rows)
        keys, values = self._written(key[:count, 0], value[:count, 0], new)
        queries = query.new_zeros(len(new.batch), new.longest_new, *query.shape[2:])
        queries[new.rows, new.offsets] = query[:count, 0]
        out = F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=new.visible,
            is_causal=new.visible is None,
            scale=self.softmax_scale,
            enable_gqa=queries.shape[2] != keys.shape[2],
        )
        result = query.new_zeros(len(query), 1, query.shape[2] * value.shape[3])
        result[:count, 0] = out.transpose(1, 2)[new.rows, new.offsets].flatten(1)
        return result

    def _written(self, key: Tensor, value: Tensor, new: NewTokens) -> tuple[Tensor, Tensor]:
        """Stores the new [S, g, d]; returns all keys and values of the pass, [n, L, g, d]."""
        if self._keys is None or self._values is None:
            # Zeros, because a masked NaN would still reach the sum.
            room = (self.num_sequences, self.capacity)
            self._keys = key.new_zeros(*room, *key.shape[1:])
            self._values = value.new_zeros(*room, *value.shape[1:])
        places = (new.batch[new.rows], new.positions)
        self._keys[places], self._values[places] = key, value
        if len(new.batch) == self.num_sequences:
            return self._keys[:, : new.longest], self._values[:, : new.longest]
        # The slice first: the copy is of what is needed.
        return self._keys[:, : new.longest][new.batch], self._values[:, : new.longest][new.batch]


class PlacedAngles(torch.nn.Module):  # type: ignore[misc]
    """Stands in place of a latent layer's RoPE module: the angles of the pass's own positions."""

    def __init__(self) -> None:
        super().__init__()
        self.angles: Tensor | None = None

    def get_rotary_seq_len(self, *unused: Any) -> int:
        """Needless here; Megatron passes it on to `forward`."""
        return 0

    def forward(self, *unused: Any, **more: Any) -> Tensor:
        """Angles [S, 1, 1, rotary dims]."""
        assert self.angles is not None, "a pass starts with CachedDecoder.extend"
        return self.angles


class CachedDecoder:
    """Grows N sequences from empty. A context manager: the chunk trains as before once it is left.

    Args:
        chunk: A whole bare GPTModel, with embedding and head.
        num_sequences: N
        capacity: C, prompt and response tokens of the longest sequence.
    """

    def __init__(self, chunk: Any, *, num_sequences: int, capacity: int) -> None:
        self._chunk = chunk
        self._lengths = [0] * num_sequences
        self._latent: bool = chunk.config.multi_latent_attention
        self._held = [
            {
                "core_attention": CachedAttention(
                    num_sequences=num_sequences,
                    capacity=capacity,
                    softmax_scale=self._softmax_scale(layer.self_attention),
                )
            }
            | ({"rotary_pos_emb": PlacedAngles()} if self._latent else {})
            for layer in chunk.decoder.layers
        ]
        with torch.no_grad():
            self._angles: Tensor = rotary_embeddings(chunk)[0](capacity)

    def _softmax_scale(self, attention: Any) -> float | None:
        scale = attention.softmax_scale if self._latent else self._chunk.config.softmax_scale
        return None if scale is None else float(scale)

    def __enter__(self) -> Self:
        self._was_training = self._chunk.training
        self._chunk.eval()
        self._swap()
        return self

    def __exit__(self, *exception: object) -> None:
        self._swap()
        self._chunk.train(self._was_training)

    def _swap(self) -> None:
        """Exchanges the layers' core attentions, and RoPE if latent, with the ones held here."""
        for held, layer in zip(self._held, self._chunk.decoder.layers, strict=True):
            for name, module in held.items():
                held[name] = getattr(layer.self_attention, name)
                setattr(layer.self_attention, name, module)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Takes in the first tokens of all sequences, [N, V] logits after them.

        Collective over TP. Prompts that stand next to each other share a pass: sort them by length.
        """
        return torch.cat(
            [self.extend(part, [prompts[i] for i in part]) for part in _passes(prompts)]
        )

    def extend(self, sequences: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Appends tokens to some sequences. Collective over TP.

        Args:
            sequences: [n] numbers of them, each once.
            tokens: [n] at least one new token id for each.

        Returns:
            [n, V] logits after each sequence's last token, whole on every rank, in the model's
            dtype.
        """
        chunk = self._chunk
        counts = [len(ids) for ids in tokens]
        device = self._angles.device
        new = NewTokens.of(sequences, [self._lengths[i] for i in sequences], counts, device)
        missing = -sum(counts) % self._multiple
        ids = torch.tensor([[t for part in tokens for t in part] + [0] * missing], device=device)
        positions = F.pad(new.positions, (0, missing))
        angles = self._angles[positions]
        for layer in chunk.decoder.layers:
            layer.self_attention.core_attention.new = new
            if self._latent:
                layer.self_attention.rotary_pos_emb.angles = angles
        for i, count in zip(sequences, counts, strict=True):
            self._lengths[i] += count
        with torch.no_grad():
            hidden = chunk.decoder(
                hidden_states=chunk.embedding(input_ids=ids, position_ids=positions[None]),
                attention_mask=None,
                rotary_pos_emb=None if self._latent else angles,
            )
            return self._logits(hidden, new.last)

    @property
    def _multiple(self) -> int:
        """Tokens of a pass are a multiple of this."""
        config = self._chunk.config
        return int(config.tensor_model_parallel_size if config.sequence_parallel else 1)

    def _logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Hidden states of this rank's tokens -> logits [n, V] of the given rows."""
        from megatron.core import tensor_parallel

        chunk = self._chunk
        if chunk.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
        tied = chunk.share_embeddings_and_output_weights
        with _whole_rows(chunk.output_layer):
            logits, _ = chunk.output_layer(
                hidden[rows],
                weight=chunk.shared_embedding_or_output_weight() if tied else None,
                runtime_gather_output=True,
            )
        result: Tensor = logits[:, 0]
        return result


@contextmanager
def _whole_rows(output_layer: Any) -> Iterator[None]:
    """Inside, the head takes all rows on every rank, not this rank's share of them."""
    before = output_layer.sequence_parallel
    output_layer.sequence_parallel = False
    try:
        yield
    finally:
        output_layer.sequence_parallel = before


def _passes(prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Cuts the prompts into runs of at most `PREFILL_TOKENS` padded tokens, in order."""
    part: list[int] = []
    longest = 0
    for i, prompt in enumerate(prompts):
        longest = max(longest, len(prompt))
        if part and (len(part) + 1) * longest > PREFILL_TOKENS:
            yield part
            part, longest = [], len(prompt)
        part.append(i)
    yield part
