"""What tests of several nodes share: a network, a tiny run, and how it ends undisturbed."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import node_network
from tests.e2e.test_run import metrics
from tests.tiny_run import make_run

SETTINGS = [
    "device=cpu", "rollout.engine=megatron", "rollout.max_running_requests=12",
    "trainer.total_steps=6", "trainer.test_freq=0", "trainer.val_before_train=false",
    "trainer.save_freq=1", "checkpoint.export_hf=false",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TwoNodes:
    """Two nodes, a run's inputs below `root`, and the metrics of two ranks of one machine."""

    nodes: list[node_network.Node]
    root: Path
    undisturbed: list[dict[str, Any]]

    def arguments(self, name: str) -> list[str]:
        """A run's own command line."""
        return [str(self.root / "run.yaml"), f"trainer.run_dir={self.root / name}", *SETTINGS]


@pytest.fixture(scope="session")
def two_nodes(tmp_path_factory):
    if reason := node_network.missing():
        pytest.skip(f"two nodes on this machine: {reason}")
    root = tmp_path_factory.mktemp("two_nodes")
    make_run(root, tie_word_embeddings=False)
    command = [
        sys.executable, "-m", "megappo.launch", "--nproc-per-node", "2", str(root / "run.yaml"),
        f"trainer.run_dir={root / 'undisturbed'}", *SETTINGS,
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=900)
    with node_network.network(["mnode0", "mnode1"]) as nodes:
        yield TwoNodes(nodes=nodes, root=root, undisturbed=metrics(root / "undisturbed"))


def ranks_of(run_dir: Path) -> list[psutil.Process]:
    """Processes that train into this folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "megappo.train" in words and f"trainer.run_dir={run_dir}" in words:
            found.append(process)
    return found
