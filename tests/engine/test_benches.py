"""The benchmarks of the engine run, and say what their tables need; no time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench.sync import in_one_piece, measure_engine, table

pytestmark = pytest.mark.engine


def test_the_bench_of_a_push_counts_what_it_pushed(engine, tiny_weights):
    memory, weights = in_one_piece(tiny_weights)
    before = engine.weight_version
    result = measure_engine(engine, "tiny", memory, weights, rounds=2)
    assert engine.weight_version == before + 4
    assert result.num_tensors == len(tiny_weights)
    assert result.num_bytes == sum(w.nbytes for w in tiny_weights.values())
    assert min(result.copy_s, result.push_s, result.ratio, result.verified_push_s) > 0
    columns = {line.count("|") for line in table([result]).splitlines()}
    assert len(columns) == 1


def test_a_run_s_path_gives_the_tokens_of_a_bare_engine(tiny_model: Path, tmp_path: Path):
    found = tmp_path / "figures.json"
    command = [
        sys.executable, "-m", "tools.bench.rollout", "--model", str(tiny_model), "--prompts", "6",
        "--tokens", "5", "--rounds", "2", "--bare", "with-plugins", "--json", str(found),
    ]  # fmt: skip
    root = Path(__file__).parents[2]
    run = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    ours, bare = json.loads(found.read_text())
    assert (ours["path"], ours["share"]) == ("the path of a run", 1.0)
    assert bare["path"] == "bare, our plug-ins"
    for row in (ours, bare):
        assert row["tokens"] == 30
        assert row["equal"] == 6
        assert min(row["seconds"], row["tokens_per_s"], row["share"]) > 0
    assert "| bare, our plug-ins |" in run.stdout
