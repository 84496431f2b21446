import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]


def test_two_torchrun_ranks_run_an_engine_each(tiny_model: Path, tmp_path: Path):
    done = subprocess.run(
        [
            sys.executable,
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            Path(__file__).parent / "torchrun_worker.py",
            tiny_model,
            tmp_path,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (json.loads((tmp_path / f"rank_{r}.json").read_text()) for r in (0, 1))
    assert first["sums"] == second["sums"] == [3.0, 3.0]
    assert first["answers"] == second["answers"]
    assert first["answers"][0] == first["answers"][1], "the same weights were pushed"
    assert (first["rank_variable"], second["rank_variable"]) == ("0", "1")
    assert "Load weight end" in (tmp_path / "engine_0.log").read_text()
    assert "Load weight end" not in done.stdout + done.stderr
