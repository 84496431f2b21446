"""Samples change ranks whole, within their mini-batch, and only where they are needed."""

from dataclasses import fields

import pytest
import torch

from megappo.types import RolloutBatch
from tests.distributed.launch import run_ranks
from tests.distributed.workers.balance import (
    LONG,
    MINI,
    PROMPTS,
    REQUIRED,
    N,
    cost,
    prompt_ids,
    response_length,
    token_values,
)

pytestmark = pytest.mark.distributed

SAMPLES = PROMPTS * N
SAMPLES_OF_MINI = MINI * N
DP = {"dp1": 1, "dp2": 2, "dp4": 4}
OPTIONAL = [f.name for f in fields(RolloutBatch) if f.name not in REQUIRED]
FLOAT_TOKEN_FIELDS = ["rollout_log_probs", *(name for name in OPTIONAL if name != "scores")]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("balance")
    run_ranks("balance.py", 4, str(folder))
    return [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(4)]


@pytest.fixture(params=[f"{dp}_{lengths}" for dp in DP for lengths in ("uneven", "equal")])
def layout(request, ranks):
    """Name of the lengths, and what the ranks of one data-parallel group got, in order."""
    dp, lengths = request.param.split("_")
    by_rank = {r["layouts"][request.param]["dp_rank"]: r for r in ranks}
    return lengths, [by_rank[d]["layouts"][request.param] for d in range(DP[dp])]


def numbers(rank):
    """Which samples a rank holds, by their scores."""
    return [round(4 * score) for score in rank["tensors"]["scores"].tolist()]


def tokens(sample, lengths):
    return len(prompt_ids(sample // N)) + response_length(sample, lengths)


def minis(rank, dp):
    held, size = numbers(rank), SAMPLES_OF_MINI // dp
    return [held[start : start + size] for start in range(0, len(held), size)]


def before(dp_rank, dp):
    """The samples of a rank before: its chunk of each mini-batch."""
    size = SAMPLES_OF_MINI // dp
    starts = range(dp_rank * size, SAMPLES, SAMPLES_OF_MINI)
    return [list(range(start, start + size)) for start in starts]


def ratio(parts, lengths):
    loads = [sum(cost(tokens(s, lengths)) for s in part) for part in parts]
    return max(loads) / (sum(loads) / len(loads))


def test_every_mini_batch_keeps_its_samples_and_every_rank_its_count(layout):
    _, group = layout
    for rank in group:
        assert len(numbers(rank)) == SAMPLES // len(group)
    for m in range(2):
        held = [s for rank in group for s in minis(rank, len(group))[m]]
        assert sorted(held) == list(range(m * SAMPLES_OF_MINI, (m + 1) * SAMPLES_OF_MINI))


def test_samples_of_a_rank_stay_in_the_order_of_one_rank_alone(layout):
    _, group = layout
    for rank in group:
        assert numbers(rank) == sorted(numbers(rank))


def test_every_field_of_a_sample_travels_with_it(layout):
    lengths, group = layout
    for rank in group:
        for b, sample in enumerate(numbers(rank)):
            n = response_length(sample, lengths)
            ids = list(range(10_000 * sample, 10_000 * sample + n))
            prompt, completion = rank["prompts"][b], rank["completions"][b]
            assert prompt["row"] == sample // N
            assert prompt["token_ids"] == prompt_ids(sample // N)
            assert completion["token_ids"] == tuple(ids)
            assert completion["finish_reason"] == ("length" if sample % 3 == 0 else "stop")
            assert completion["log_probs"] == tuple(token_values(0, sample, n).tolist())
            tensors = {name: t[b] for name, t in rank["tensors"].items()}
            assert tensors["responses"][:n].tolist() == ids
            assert tensors["response_mask"][:n].tolist() == [
                (t + sample) % 3 != 0 for t in range(n)
            ]
            for name in FLOAT_TOKEN_FIELDS:
                number = ["rollout_log_probs", *OPTIONAL].index(name)
                assert torch.equal(tensors[name][:n], token_values(number, sample, n)), name


def test_all_fields_of_the_batch_are_set_again_and_keep_their_dtypes(layout):
    _, group = layout
    kinds = {"responses": torch.int64, "response_mask": torch.bool}
    for rank in group:
        assert set(rank["tensors"]) == {f.name for f in fields(RolloutBatch)} - {
            "prompts",
            "completions",
        }
        for name, tensor in rank["tensors"].items():
            assert tensor.dtype == kinds.get(name, torch.float32), name


def test_padding_is_zero_and_as_wide_as_the_longest_response_needs(layout):
    lengths, group = layout
    for rank in group:
        spans = [response_length(s, lengths) for s in numbers(rank)]
        for name, tensor in rank["tensors"].items():
            if name == "scores":
                continue
            assert tensor.shape == (len(spans), max(spans)), name
            for b, n in enumerate(spans):
                assert not tensor[b, n:].any(), name


def test_texts_are_empty_for_moved_and_kept_samples(layout):
    _, group = layout
    for rank in group:
        assert {c["text"] for c in rank["completions"]} == {""}
        for prompt in rank["prompts"]:
            assert (prompt["data_source"], prompt["ground_truth"]) == ("", "")
            assert prompt["extra_info"] == {}


def test_costs_are_as_level_as_one_very_long_sample_allows(layout):
    lengths, group = layout
    dp = len(group)
    for m in range(2):
        parts = [minis(rank, dp)[m] for rank in group]
        span = range(m * SAMPLES_OF_MINI, (m + 1) * SAMPLES_OF_MINI)
        costs = sorted(cost(tokens(s, lengths)) for s in span)
        # The rank of the longest sample has at least the cheapest others next to it.
        least = max(sum(costs) / dp, costs[-1] + sum(costs[: SAMPLES_OF_MINI // dp - 1]))
        assert max(sum(cost(tokens(s, lengths)) for s in part) for part in parts) <= 1.02 * least


def test_metrics_say_what_happened_on_every_rank(layout):
    lengths, group = layout
    dp = len(group)
    starts = [before(d, dp) for d in range(dp)]
    ends = [minis(rank, dp) for rank in group]
    moved = sum(s not in starts[d][m] for d in range(dp) for m in range(2) for s in ends[d][m])
    expected = {
        "balance/cost_ratio_before": max(ratio([s[m] for s in starts], lengths) for m in range(2)),
        "balance/cost_ratio_after": max(ratio([e[m] for e in ends], lengths) for m in range(2)),
        "balance/moved_share": moved / SAMPLES,
    }
    for rank in group:
        assert rank["metrics"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dp", DP)
def test_nothing_moves_where_the_ranks_are_level_already(ranks, dp):
    for rank in ranks:
        layout = rank["layouts"][f"{dp}_equal"]
        assert layout["metrics"]["balance/moved_share"] == 0
        assert layout["metrics"]["balance/cost_ratio_after"] == 1
        assert minis(layout, DP[dp]) == before(layout["dp_rank"], DP[dp])


def test_ranks_of_one_replica_hold_the_same(ranks):
    """DP2 x TP2: ranks 0 and 1 are one replica, 2 and 3 the other."""
    for one, other in ((0, 1), (2, 3)):
        a, b = (ranks[r]["layouts"]["dp2_uneven"] for r in (one, other))
        assert a["dp_rank"] == b["dp_rank"]
        assert a["prompts"] == b["prompts"]
        assert a["completions"] == b["completions"]
        for name, tensor in a["tensors"].items():
            assert torch.equal(tensor, b["tensors"][name]), name


def test_a_rank_receives_the_lengths_of_all_and_beyond_them_only_its_new_samples(layout):
    lengths, group = layout
    dp = len(group)

    def size(sample):
        """Row, reason, prompt, ids, mask as int64; a score and the float fields as float32."""
        n = response_length(sample, lengths)
        integers = 2 + len(prompt_ids(sample // N)) + 2 * n
        return 8 * integers + 4 * (1 + n * len(FLOAT_TOKEN_FIELDS))

    for d, rank in enumerate(group):
        new = [s for m in range(2) for s in minis(rank, dp)[m] if s not in before(d, dp)[m]]
        sizes_of_parcels = 16 * (dp - 1)
        received = {
            "all_gather": 16 * SAMPLES * (dp - 1) // dp,
            "all_to_all": sizes_of_parcels + sum(size(s) for s in new),
        }
        assert rank["received"] == received


def test_no_rank_receives_the_batch_of_all(ranks):
    """The long sample alone is half of it, and goes to nobody but the rank that trains on it."""
    everything = sum(tokens(s, "uneven") for s in range(SAMPLES))
    for rank in ranks:
        held = numbers(rank["layouts"]["dp4_uneven"])
        others = sum(tokens(s, "uneven") for s in held if s != 30)
        assert others < (everything - LONG) / 3
    assert sum(30 in numbers(rank["layouts"]["dp4_uneven"]) for rank in ranks) == 1


def test_exchange_delivers_each_parcel_to_its_rank_alone(ranks):
    for d, rank in enumerate(ranks):
        assert rank["exchanged"] == [
            ([100 * s + d] * (s * d), pytest.approx([s + d / 10] * (d % 2))) for s in range(4)
        ]
