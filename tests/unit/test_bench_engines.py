"""The arithmetic of the engines' benchmark; the engines themselves are tested in tests/engine."""

import pytest

from megappo.types import Completion
from tools.bench.engines import Measured, agreement, requests, table


def completion(tokens: tuple[int, ...], log_prob: float) -> Completion:
    return Completion(
        token_ids=tokens, log_probs=(log_prob,) * len(tokens), finish_reason="length", text=""
    )


def test_the_table_shows_new_tokens_a_second_beside_those_of_the_first_engine():
    results = [
        Measured(engine="sglang", seconds=2.0, tokens=4000),
        Measured(engine="megatron", seconds=4.0, tokens=4000),
    ]
    rows = table(results).splitlines()
    assert rows[-2:] == ["| sglang | 2,000 | 1.00 |", "| megatron | 1,000 | 0.50 |"]


def test_log_probs_are_compared_where_tokens_are_equal():
    first = [completion((1, 2), -0.5), completion((3,), -1.0)]
    second = [completion((1, 2), -0.75), completion((4,), -9.0)]
    assert agreement(first, second) == (1, pytest.approx(0.25))


def test_requests_are_the_same_in_every_run_and_uneven_in_length():
    wanted = requests(16, new_tokens=4, vocab_size=100)
    assert wanted == requests(16, new_tokens=4, vocab_size=100)
    lengths = [len(request.token_ids) for request in wanted]
    assert (lengths[0], lengths[-1]) == (8, 96)
    assert len(set(lengths)) == 16
    assert len({request.seed for request in wanted}) == 16
