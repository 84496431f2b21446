"""Exit codes of a training run, by how it ended."""

import pytest

from megappo import train
from megappo.errors import GuardStop, RanksDifferError, SaveError, StopRequested


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        (RanksDifferError("w differs"), 1, "failed: w differs\n"),
        (SaveError("the disk is full"), 1, "failed: the disk is full\n"),
        (GuardStop("step 3: nan"), 3, "stopped by a guard: step 3: nan\n"),
        (StopRequested("stopped"), 75, "stopped; start the same command to go on\n"),
    ],
)
def test_how_a_run_ended_is_told_and_is_its_exit_code(monkeypatch, capsys, end, code, told):
    def run(process, config_path, overrides):
        raise end

    monkeypatch.setattr(train, "die_with_launcher", lambda: None)
    monkeypatch.setattr(train, "_run", run)
    assert train.main(["run.yaml"]) == code
    assert capsys.readouterr().err == told
