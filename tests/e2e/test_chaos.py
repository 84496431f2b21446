"""`tools/chaos.py` in small: a run that is killed while it saves and starts ends like another."""

import random
import shutil

import pytest

from megappo.checkpoint import layout
from tools.chaos import Harness
from tools.kills.checks import problems_after_kill, problems_at_end
from tools.kills.kill_log import Log

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


def test_a_run_that_is_killed_while_saving_and_starting_ends_like_an_undisturbed_one(tmp_path):
    log = Log(None)
    # This seed lets no save pass: the last one may be done before the kill.
    harness = Harness("dp2", work=tmp_path, steps=2, rng=random.Random(5), log=log)
    # From the last to the first: files are written by a thread of each rank, asynchronously.
    deck = [("launcher", "start"), ("all", "renamed"), ("rank", "writing")]
    life = harness.live(0, deck, max_kills=3)
    assert life.problems == []
    assert deck == []
    assert (life.starts, life.kills) == (4, 3)
    kills = [(kill["victim"], kill["moment"], kill["exit_code"]) for kill in log.lines]
    assert kills == [("rank", "writing", 1), ("all", "renamed", -9), ("launcher", "start", -9)]
    assert not [name for name in life.temporary if name.startswith("torchelastic")]
    an_older_export_is_not_taken_for_this_ones(harness, tmp_path / "dp2" / "run_0")
    harness_finds_what_it_looks_for(harness.undisturbed, tmp_path / "dp2")


def an_older_export_is_not_taken_for_this_ones(harness, run_dir):
    """As after a kill between the last checkpoint of a run that was prolonged, and its export."""
    (run_dir / "actor_hf" / "megappo_step.json").write_text('{"step": 1}\n')
    (run_dir / "actor_hf" / "model.safetensors").write_bytes(b"older")
    again = harness.start(run_dir)
    try:
        assert again.wait(300) == 0, again.screen
    finally:
        again.end()
    assert problems_at_end(run_dir, harness.undisturbed) == []


def harness_finds_what_it_looks_for(undisturbed, folder):
    """Damage of each kind, in a copy of the run that was killed."""
    damaged = folder / "damaged"
    shutil.copytree(folder / "run_0", damaged)
    assert problems_at_end(damaged, undisturbed) == []
    checkpoints = layout.folder_of(damaged)
    assert problems_after_kill(checkpoints, undisturbed, newest=2) == []
    assert problems_after_kill(checkpoints, undisturbed, newest=3) == [
        "latest went back from step 3 to 2"
    ]
    weights = sorted((checkpoints / "step_000002" / "actor").glob("*.distcp"))[0]
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    (found,) = problems_after_kill(checkpoints, undisturbed, newest=2)
    assert found == f"checkpoint of step 2: actor/{weights.name}"
    (checkpoints / "step_000003.saving").mkdir()
    (checkpoints / "step_000003.saving" / "x").touch()
    lines = (damaged / "metrics.jsonl").read_text().replace('"actor/lr": ', '"actor/lr": 1')
    (damaged / "metrics.jsonl").write_text(lines)
    (damaged / "events.jsonl").open("a").write('{"time": 1, "kind": "warning", "step": 1}\n')
    found = problems_at_end(damaged, undisturbed)
    for part in ("step 1: actor/lr", f"actor/{weights.name}", "event only here", "file only here"):
        assert any(part in problem for problem in found), (part, found)
    (checkpoints / layout.LATEST).write_text("step_000009\n")
    (found,) = problems_after_kill(checkpoints, undisturbed, newest=2)
    assert "names step_000009, which is missing" in found
