"""The arithmetic of the rollout benchmarks; tests/engine runs them."""

import pytest
import torch

from tools.bench.rollout import PROMPT_TOKENS, prompts, summary, table
from tools.bench.sync import in_one_piece


def test_a_share_is_the_median_of_the_rounds_own_shares():
    mine, other = [(1, 2), (3, 4)], [(1, 2), (3, 5)]
    rounds = [
        [(1.0, mine), (0.5, other)],
        [(4.0, mine), (4.0, other)],
        [(2.0, mine), (3.0, other)],
    ]
    ours, bare = summary(["ours", "bare"], rounds)
    assert (ours.seconds, ours.share, ours.equal) == (2.0, 1.0, 2)
    assert (bare.seconds, bare.share, bare.equal) == (3.0, 1.0, 1)
    assert ours.tokens_per_s == pytest.approx(2.0)
    rows = table([ours, bare], num_prompts=2).splitlines()
    assert rows[-1] == "| bare | 1 | 1.000 | 1 of 2 |"


def test_prompts_are_the_same_in_every_run_and_uneven_in_length():
    batch = prompts(16, vocab_size=100)
    assert batch == prompts(16, vocab_size=100)
    lengths = [len(prompt.token_ids) for prompt in batch.prompts]
    assert (lengths[0], lengths[-1]) == PROMPT_TOKENS
    assert max(t for prompt in batch.prompts for t in prompt.token_ids) < 50
    assert [prompt.row for prompt in batch.prompts] == list(range(16))


def test_weights_in_one_piece_are_the_weights():
    weights = {"a": torch.randn(2, 3), "b": torch.randn(4), "c": torch.randn(3, 2).T}
    memory, copies = in_one_piece(weights)
    assert memory.numel() == 16
    for name, weight in weights.items():
        assert torch.equal(copies[name], weight)
        assert copies[name].untyped_storage().data_ptr() == memory.data_ptr()
