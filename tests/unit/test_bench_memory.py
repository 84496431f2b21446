"""The memory benchmarks measure what they say: real passes, and the arithmetic of tables."""

from tools.bench import log_probs, optimizer_memory
from tools.bench.log_probs import Case, Result
from tools.bench.optimizer_memory import Measured

# Half a GB: large beside what a process needs for itself.
SMALL = {
    "dtype": "float32",
    "backward": True,
    "tokens": 1024,
    "vocab": 120_000,
    "device": "cpu",
}


def test_log_probs_need_one_logits_tensor_and_little_more_where_naive_ones_need_three():
    ours = log_probs.measure_apart(Case(method="ours", chunk_tokens=32, **SMALL))
    naive = log_probs.measure_apart(Case(method="naive", chunk_tokens=0, **SMALL))
    assert ours.case.logits_bytes == 1024 * 120_000 * 4
    # Four float32 blocks of a chunk of 1/32 come on top.
    assert 1.0 < ours.ratio < 1.3
    assert 2.8 < naive.ratio < 3.3


def test_the_table_of_log_probs_shows_peaks_in_logits_tensors():
    case = Case(method="ours", chunk_tokens=64, **SMALL)
    result = Result(case=case, peak_bytes=3 * case.logits_bytes // 2, seconds=2.0)
    row = log_probs.table([result]).splitlines()[-1]
    assert row == (
        "| float32 | 0.49 GB | forward + backward | ours, 64 tokens a chunk | 0.74 GB | 1.50 "
        "| 2.0 s |"
    )


def measured(rank: int, optimizer_bytes: int) -> Measured:
    return Measured(
        rank=rank,
        parameters=1000,
        params_bytes=4000,
        grads_bytes=4000,
        optimizer_bytes=optimizer_bytes,
    )


def test_the_table_of_optimizer_state_shows_the_largest_rank_against_an_even_split():
    results = {1: [measured(0, 8000)], 2: [measured(0, 3900), measured(1, 4200)]}
    rows = optimizer_memory.table(results).splitlines()
    assert rows[-2].endswith("| 8,000 B | 1.0000 |")
    assert rows[-1].endswith("| 4,200 B | 1.0500 |")
