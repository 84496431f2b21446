"""A real Slurm with one controller and a slurmd in each of a few network namespaces. Root alone.

munge and Slurm run with files and sockets of their own, so one that the machine has is not touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.node_network import HUB, Node

CONF = """\
ClusterName=test
SlurmctldHost={controller}({hub})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldPort=17000
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool/%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
GresTypes=gpu
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=60
"""


def missing() -> str:
    """Why there cannot be a Slurm here; empty if there can."""
    tools = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "scancel")
    absent = [tool for tool in tools if shutil.which(tool) is None]
    return f"needs {', '.join(absent)} (tests/install_system.sh)" if absent else ""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A Slurm that answers."""

    folder: Path
    environment: Mapping[str, str]

    def run(self, *arguments: str, cwd: Path | None = None, **environment: str) -> str:
        """A command of Slurm's; returns what it printed."""
        done = subprocess.run(
            arguments, cwd=cwd, env={**self.environment, **environment}, text=True, check=False,
            capture_output=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says of it."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, *states: str, timeout_s: float = 900) -> dict[str, str]:
        """Until the job is in one of these states; returns what is said of it then."""
        deadline = time.monotonic() + timeout_s
        while (found := self.job(number))["JobState"] not in states:
            assert time.monotonic() < deadline, f"job {number} is {found} after {timeout_s} s"
            time.sleep(0.3)
        return found


@contextmanager
def cluster(folder: Path, nodes: Sequence[Node]) -> Iterator[Cluster]:
    """Starts munge, the controller and a slurmd a node; ends them all."""
    folder.mkdir(parents=True)
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    lines = [
        f"NodeName={n.name} NodeAddr={n.address} Port={17001 + i} CPUs=2 Gres=gpu:1"
        for i, n in enumerate(nodes)
    ]
    conf = folder / "slurm.conf"
    conf.write_text(
        CONF.format(
            folder=folder, hub=HUB, controller=os.uname().nodename.split(".")[0],
            nodes="\n".join(lines),
        )
    )  # fmt: skip
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
    key = folder / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(os.urandom(128))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    environment["SLURM_CONF"] = str(conf)
    found = Cluster(folder=folder, environment=environment)
    own = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    commands = [["munged", "--force", "--foreground", f"--socket={folder}/munge.socket", *own]]
    commands += [["slurmctld", "-D"]]
    commands += [n.command(["slurmd", "-D", "-N", n.name]) for n in nodes]
    processes = []
    try:
        for command in commands:
            log = (folder / f"daemon{len(processes)}.log").open("w")
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            if command[0] == "munged":
                _wait_for(lambda: (folder / "munge.socket").exists(), folder)
        _wait_for(lambda: _idle_nodes(environment) == len(nodes), folder)
        yield found
    finally:
        _end(processes, nodes)


def _idle_nodes(environment: Mapping[str, str]) -> int:
    told = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"],
        env=dict(environment), capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    return len(told.stdout.split()) if told.returncode == 0 else 0


def _wait_for(condition, folder: Path, timeout_s: float = 180) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        logs = "\n".join(p.read_text()[-2000:] for p in sorted(folder.glob("daemon*.log")))
        assert time.monotonic() < deadline, f"Slurm does not come up:\n{logs}"
        time.sleep(0.2)


def _end(processes: Sequence[subprocess.Popen[bytes]], nodes: Sequence[Node]) -> None:
    """All processes of the nodes, left jobs included; then the controller and munge."""
    for node in nodes:
        for pid in _pids(node):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for process in reversed(processes):
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _pids(node: Node) -> list[int]:
    """Processes in the node's namespace, which are all this cluster's."""
    told = subprocess.run(
        ["ip", "netns", "pids", node.name], capture_output=True, text=True, check=True
    )
    return [int(word) for word in told.stdout.split()]
