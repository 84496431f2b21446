"""The doctor measures real groups of real ranks, and names a rank that is slow."""

import json

import pytest

from tests.distributed.launch import run_ranks

pytestmark = pytest.mark.distributed


def names_rank_2_alone(found):
    with_slow = [pair["seconds"] for pair in found["pairs"] if 2 in pair["ranks"]]
    others = [pair["seconds"] for pair in found["pairs"] if 2 not in pair["ranks"]]
    return (
        min(with_slow) > max(others)
        and found["slow_rank"] == 2
        and sorted(found["slow_pairs"]) == [[0, 2], [1, 2], [2, 3]]
    )


def test_groups_are_measured_and_a_rank_that_is_stopped_half_the_time_is_named(tmp_path):
    """Other work on this machine may stop other ranks as well: one measurement of three tells."""
    config = tmp_path / "run.yaml"
    config.write_text("device: cpu\nmodel: {path: m}\ndata: {train_files: [t], val_files: [v]}\n")
    seen = []
    while not seen or (len(seen) < 3 and not names_rank_2_alone(seen[-1])):
        outputs = run_ranks(
            "network.py", 4, str(config), "2", "parallel.tp=2", "--megabytes", "1", "--json"
        )
        seen.append(json.loads(outputs[0][outputs[0].index("{\n") :]))
    found = seen[-1]
    measured = {(s["kind"], tuple(s["ranks"]), s["collective"]) for s in found["speeds"]}
    groups = [("tp", (0, 1)), ("tp", (2, 3)), ("dp", (0, 2)), ("dp", (1, 3))]
    collectives = ("all-reduce", "all-gather", "reduce-scatter")
    assert measured == {(kind, ranks, c) for kind, ranks in groups for c in collectives}
    assert all(s["latency_us"] > 0 and s["bandwidth_gb_s"] > 0 for s in found["speeds"])
    assert [pair["ranks"] for pair in found["pairs"]] == [
        [0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3],
    ]  # fmt: skip
    assert names_rank_2_alone(found), [one["pairs"] for one in seen]
