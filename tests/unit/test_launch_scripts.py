"""Shell scripts of `launch/`: what they refuse, and what local.sh passes on."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"


def bash(script, *arguments, **environment):
    return subprocess.run(
        ["bash", str(script), *arguments], env=os.environ | environment, timeout=120,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("local.sh", []),
        ("local.sh", ["2"]),
        ("slurm/chain.sh", []),
        ("slurm/chain.sh", ["many", "launch/slurm/ppo.sbatch", "x.yaml"]),
    ],
)
def test_without_what_it_needs_a_script_shows_its_usage(script, arguments):
    result = bash(LAUNCH / script, *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"usage: bash launch/{script} NUM_")


def test_local_refuses_what_is_no_config_before_anything_is_started():
    result = bash(LAUNCH / "local.sh", "2", "no-config")
    assert result.returncode == 2
    assert "CONFIG.yaml" in result.stderr


@pytest.mark.parametrize("code", [0, 1, 3, 75])
def test_local_passes_arguments_on_as_they_are_and_the_exit_code_back(tmp_path, code):
    (tmp_path / "launch").mkdir()
    script = shutil.copy(LAUNCH / "local.sh", tmp_path / "launch")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$OMP_NUM_THREADS" "$@"\nexit {code}\n')
    python.chmod(0o755)
    result = bash(script, "2", "my run.yaml", "a.b=[1, 2]", OMP_NUM_THREADS="")
    assert result.returncode == code
    assert result.stdout.splitlines() == [
        "1", "-m", "megappo.launch", "--nproc-per-node", "2", "my run.yaml", "a.b=[1, 2]",
    ]  # fmt: skip
