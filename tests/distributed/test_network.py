"""The doctor measures real groups of real ranks, and names a rank that is slow."""

import json

import pytest

from tests.distributed.launch import run_ranks

pytestmark = pytest.mark.distributed


def test_groups_are_measured_and_a_rank_that_is_stopped_half_the_time_is_named(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("device: cpu\nmodel: {path: m}\ndata: {train_files: [t], val_files: [v]}\n")
    outputs = run_ranks(
        "network.py", 4, str(config), "2", "parallel.tp=2", "--megabytes", "0.25", "--json"
    )
    found = json.loads(outputs[0][outputs[0].index("{\n") :])
    measured = {(s["kind"], tuple(s["ranks"]), s["collective"]) for s in found["speeds"]}
    groups = [("tp", (0, 1)), ("tp", (2, 3)), ("dp", (0, 2)), ("dp", (1, 3))]
    collectives = ("all-reduce", "all-gather", "reduce-scatter")
    assert measured == {(kind, ranks, c) for kind, ranks in groups for c in collectives}
    assert all(s["latency_us"] > 0 and s["bandwidth_gb_s"] > 0 for s in found["speeds"])
    assert [pair["ranks"] for pair in found["pairs"]] == [
        [0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3],
    ]  # fmt: skip
    with_slow = [pair["seconds"] for pair in found["pairs"] if 2 in pair["ranks"]]
    others = [pair["seconds"] for pair in found["pairs"] if 2 not in pair["ranks"]]
    assert min(with_slow) > max(others), found["pairs"]
    assert found["slow_rank"] == 2, found["pairs"]
    assert sorted(found["slow_pairs"]) == [[0, 2], [1, 2], [2, 3]]
