import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import prompt_of_row

from megappo.rollout.engine import GenerationRequest
from megappo.rollout.sampling import SamplingSettings, sample_seed

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def two_ranks(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two_ranks")
    done = subprocess.run(
        [
            sys.executable,
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            Path(__file__).parent / "torchrun_worker.py",
            tiny_model,
            folder,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Load weight end" in (folder / "engine_0.log").read_text()
    assert "Load weight end" not in done.stdout + done.stderr
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1)]


def test_two_torchrun_ranks_run_an_engine_each(two_ranks):
    first, second = two_ranks
    assert first["sums"] == second["sums"] == [3.0, 3.0]
    assert first["answers"] == second["answers"]
    assert first["answers"][0] == first["answers"][1], "the same weights were pushed"
    assert (first["rank_variable"], second["rank_variable"]) == ("0", "1")


def test_four_samples_of_a_prompt_differ_and_are_the_same_in_any_layout_and_run(two_ranks, engine):
    first, second = two_ranks
    expected = first["one_rank"]
    assert [row for row, _ in expected] == [row for row in range(4) for _ in range(4)]
    for row in range(4):
        siblings = [tuple(tokens) for r, tokens in expected if r == row]
        assert len(set(siblings)) == 4
    assert second["one_rank"] == expected
    assert first["dp2"] + second["dp2"] == expected
    assert first["tp2"] == second["tp2"] == expected
    sampling = SamplingSettings(max_new_tokens=8, ignore_eos=True)
    requests = [
        GenerationRequest(
            token_ids=prompt_of_row(row).token_ids,
            seed=sample_seed(5, step=1, row=row, sample=k),
            sampling=sampling,
        )
        for row in range(4)
        for k in range(4)
    ]
    another_run = [list(c.token_ids) for c in engine.generate(requests)]
    assert another_run == [tokens for _, tokens in expected]


def test_the_next_step_draws_other_samples_of_the_same_prompts(two_ranks):
    first, _ = two_ranks
    pairs = zip(first["next_step"], first["tp2"], strict=True)
    assert all(new != old for new, old in pairs)


def test_an_engine_that_never_starts_again_is_lost_on_all_ranks_after_max_restarts(two_ranks):
    for facts in two_ranks:
        assert facts["lost"].startswith(
            "the engine of rank 1 failed after 2 restarts, and rollout.max_restarts is 2: "
        )
        assert facts["lost"].endswith("gone is no model folder: it has no config.json")
        assert [rank for rank, _ in facts["restarts"]] == [1, 1]
        reasons = [reason for _, reason in facts["restarts"]]
        assert reasons[0].startswith("SGLang died while generating 1 responses: process ")
        assert "ended with exit code -9" in reasons[0]
        assert "is no model folder" in reasons[1]
