"""What torchrun and Slurm told this process, and its tie to the launcher."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import psutil

from megappo.distributed.launcher_death import LAUNCHER_PID
from megappo.errors import UserError


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """What torchrun told this process; one process alone is a world of its own."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """ranks of this node"""
    address: str = "localhost"
    """of rank 0's machine"""
    restarts: int = 0
    """how often torchrun or Slurm has started this run anew"""
    launcher_age_s: float = 0.0
    """seconds since this node's launcher started, if it has started its ranks anew; else 0"""
    num_nodes: int = 1
    node: int = 0
    """this node's number, as torchrun counts"""
    slurm_nodes: int = 1
    """nodes of the Slurm step that this process is part of"""

    @classmethod
    def read(cls) -> LaunchEnvironment:
        """Reads torchrun's variables, the only place that does.

        Raises:
            UserError: only some of them are set, or not numbers.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        found = {n: os.environ[n] for n in names if n in os.environ}
        by_torchrun = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        restarts = by_torchrun + int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        slurm_nodes = read_slurm_nodes()
        if not found:
            return cls(
                rank=0,
                world_size=1,
                local_rank=0,
                local_world_size=1,
                restarts=restarts,
                slurm_nodes=slurm_nodes,
            )
        if len(found) < len(names) or not all(v.isdigit() for v in found.values()):
            raise UserError(
                f"the environment has {found}, but {', '.join(names)} must all be set to numbers: "
                "start with torchrun, or unset them"
            )
        rank, world_size = int(found["RANK"]), int(found["WORLD_SIZE"])
        # torchrun sets it; without it all ranks count as one node's.
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        num_nodes = -(-world_size // local_world_size)
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=int(found["LOCAL_RANK"]),
            local_world_size=local_world_size,
            address=os.environ.get("MASTER_ADDR", "localhost"),
            restarts=restarts,
            launcher_age_s=_launcher_age_s() if by_torchrun else 0.0,
            # torchrun's too; they hold also where nodes start different numbers of ranks.
            num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", num_nodes)),
            node=int(os.environ.get("GROUP_RANK", rank // local_world_size)),
            slurm_nodes=slurm_nodes,
        )


def _launcher_age_s() -> float:
    """Of `megappo.launch`, which says who it is, or of torchrun, this process's parent."""
    launcher = psutil.Process(int(os.environ.get(LAUNCHER_PID, os.getppid())))
    started: float = launcher.create_time()
    return max(0.0, time.time() - started)


def read_slurm_nodes() -> int:
    """Nodes of the Slurm step (or else the job) that this process is part of; 1 without Slurm."""
    names = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    return int(next((os.environ[n] for n in names if os.environ.get(n, "").isdigit()), "1"))


def check_slurm_nodes(num_nodes: int, slurm_nodes: int) -> None:
    """Each node of a Slurm step that trains alone would give as many runs in one run folder.

    Raises:
        UserError: the step has several nodes and the run one.
    """
    if num_nodes == 1 < slurm_nodes:
        raise UserError(
            f"this is a run of one node, in a Slurm step of {slurm_nodes}: each node would train "
            "alone, all in one run folder; start with launch/slurm/ppo.sbatch or launch/node.sh "
            "(docs/launch.md), or take one node (srun --nodes=1, or unset SLURM_NNODES)"
        )
