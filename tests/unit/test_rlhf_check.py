import json

import pytest

from tools.rlhf_check import main


def write_runs(root, *, accuracy=0.95, rewards=(0.5, 0.8, 1.2, 1.3)):
    """Folders of the three runs with the metrics that are looked at; None: it was not finite."""
    sft = [{"val/loss": 0.3}, {"val/loss": 0.1}]
    rm = [{"val/accuracy": 0.5, "val/margin": 0.0}, {"val/accuracy": accuracy, "val/margin": 2.0}]
    greedy = {"val/reward_model/mean": 0.9, "val/score/mean": 0.8}
    ppo = [greedy, *({"reward/model/mean": r, "reward/rules/mean": 0.5} for r in rewards)]
    for name, rows in (("sft", sft), ("rm", rm), ("ppo", ppo)):
        (root / name).mkdir()
        lines = [json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(rows)]
        (root / name / "metrics.jsonl").write_text("".join(lines))
    return [str(root / name) for name in ("sft", "rm", "ppo")]


def test_a_demo_that_learned_passes_and_shows_its_figures(tmp_path, capsys):
    assert main(write_runs(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert "right order: 0.500 (step 0) -> 0.950 (step 1)" in shown
    assert "reward of sampled answers: 0.500 (step 1) -> 1.300 (step 4)" in shown


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({"accuracy": 0.9}, "accuracy must be over 0.9, but is 0.900"),
        ({"rewards": (0.5, 0.4, 0.9, 0.9, 0.4)}, "but rose by 0.233"),
        ({"rewards": (0.5, 0.1, 0.7, 0.7, 0.7)}, "but rose by 0.200"),
        ({"rewards": (0.5,)}, "but rose by 0.000"),
    ],
)
def test_a_demo_that_learned_too_little_fails_and_says_so(tmp_path, capsys, numbers, reason):
    assert main(write_runs(tmp_path, **numbers)) == 1
    (line,) = [t for t in capsys.readouterr().out.splitlines() if t.startswith("too little:")]
    assert reason in line


def test_numbers_that_are_missing_or_not_finite_are_named(tmp_path, capsys):
    sft, rm, ppo = write_runs(tmp_path, rewards=(0.5, None, 1.0))
    assert main([sft, rm, ppo]) == 2
    assert "reward/model/mean, finite" in capsys.readouterr().err
    assert main([sft, str(tmp_path / "none"), ppo]) == 2
    assert "val/accuracy" in capsys.readouterr().err
    assert main([sft]) == 2
    assert "usage:" in capsys.readouterr().err
