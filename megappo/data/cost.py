"""Work of one sequence in a model, in floating-point operations: what `balance` levels over ranks.

Legend: n tokens of the sequence, h hidden size, L layers, q and k query and key-value heads of d
dimensions each, f inner size of the MLP, V vocabulary; in layers with experts E of them, K chosen a
token, g inner size of one. A multiply-add is two operations.

    per layer and token   2 h d (q + 2 k)  query, key and value projections
                        + 2 q d h          output projection
                        + 2 * 3 h f        SwiGLU: gate, up and down
                  or, with experts,
                        + 2 h E + K * 2 * 3 h g    router, and the chosen experts
                        + 2 * 3 h s                shared experts of s together
    per token             2 h V            output projection to the vocabulary
    per layer and pair    2 * 2 q d        scores and weighted values, for each (query, key) pair;
                                           causal attention has n (n + 1) / 2 pairs

Latent attention has other projections, by its own sizes, and values of v dims: 2 q (d + v) a pair.

As Narayanan et al. 2021 ("Efficient large-scale language model training on GPU clusters using
Megatron-LM", appendix), with grouped key-value heads, SwiGLU, and the half of the attention matrix
that a causal kernel computes. A backward pass takes twice the forward's work whatever n is, so the
ratio between two sequences is right for training too.

Left out: norms, RoPE, softmax and the embedding, which are bound by memory and linear in n.
"""

from __future__ import annotations

from dataclasses import dataclass

from megappo.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class SequenceCost:
    """`cost(n)`: operations of one forward pass over a sequence of n tokens."""

    per_token: int
    """Operations a token in all matrix products with weights."""
    per_pair: int
    """Operations a (query, key) pair in attention, over all layers."""

    @classmethod
    def of_model(cls, spec: ModelSpec) -> SequenceCost:
        """The cost of a decoder, dense or with experts, that projects to the vocabulary.

        A critic differs by its value head alone: it is given the same share of samples, and the
        projection is a small part of the work.
        """
        queries = spec.num_heads * spec.head_dim
        values = queries if spec.latent is None else spec.num_heads * spec.latent.value_dim
        projections = 2 * _attention_weights(spec)
        mlp = 2 * 3 * spec.hidden_size * spec.ffn_hidden_size
        experts = 2 * spec.hidden_size * spec.num_experts + spec.experts_per_token * (
            2 * 3 * spec.hidden_size * spec.moe_ffn_hidden_size
        )
        experts += 2 * 3 * spec.hidden_size * spec.shared_ffn_hidden_size
        num_moe = sum(spec.has_experts(layer) for layer in range(spec.num_layers))
        return cls(
            per_token=spec.num_layers * projections
            + (spec.num_layers - num_moe) * mlp
            + num_moe * experts
            + 2 * spec.hidden_size * spec.vocab_size,
            per_pair=spec.num_layers * 2 * (queries + values),
        )

    def __call__(self, num_tokens: int) -> float:
        """Operations of one forward pass; exact below 2 ** 53."""
        pairs = num_tokens * (num_tokens + 1) // 2
        return float(num_tokens * self.per_token + pairs * self.per_pair)


def _attention_weights(spec: ModelSpec) -> int:
    """Elements of the matrices of one layer's attention that multiply each token."""
    hidden, queries = spec.hidden_size, spec.num_heads * spec.head_dim
    if spec.latent is None:
        return hidden * (2 * queries + 2 * spec.num_kv_heads * spec.head_dim)
    latent, small = spec.latent, spec.latent.key_value_rank
    rank = latent.query_rank
    query = hidden * queries if rank is None else rank * (hidden + queries)
    down = hidden * (small + latent.rotary_dim)
    up = small * spec.num_heads * (latent.plain_dim + latent.value_dim)
    return query + down + up + spec.num_heads * latent.value_dim * hidden
