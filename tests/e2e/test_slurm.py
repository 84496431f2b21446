"""launch/slurm on a real Slurm of two nodes: signalled, requeued, finished; killed; cancelled."""

import json
import time
from pathlib import Path

import pytest

from tests import slurm_cluster
from tests.e2e.conftest import ranks_of
from tests.e2e.test_run import metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def slurm(two_nodes, tmp_path_factory):
    if reason := slurm_cluster.missing():
        pytest.skip(f"a real Slurm: {reason}")
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm") / "s", two_nodes.nodes) as made:
        yield made


def submit(slurm, *arguments, command=("sbatch", "--parsable"), **environment):
    """A job or more of two nodes with one "GPU" each, as a user submits it."""
    told = slurm.run(
        *command, f"--output={slurm.folder}/job-%j.out", "--gpus-per-node=1", "--time=10",
        "--signal=B:USR1@60", "launch/slurm/ppo.sbatch", *arguments, cwd=REPOSITORY, **environment,
    )  # fmt: skip
    return told.splitlines()


def output(slurm, job):
    return (slurm.folder / f"job-{job}.out").read_text()


def latest_step(run_dir):
    """Of the newest whole checkpoint; 0 before there is one."""
    latest = run_dir / "checkpoints" / "latest"
    return int(latest.read_text().strip()[5:]) if latest.exists() else 0


def wait_for_step(slurm, job, run_dir, step):
    deadline = time.monotonic() + 900
    while latest_step(run_dir) < step:
        assert slurm.job(job)["JobState"] in ("RUNNING", "PENDING"), output(slurm, job)
        assert time.monotonic() < deadline, output(slurm, job)
        time.sleep(0.05)


def events(run_dir, kind):
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["kind"] == kind]


def test_a_killed_rank_ends_the_job_and_a_signalled_job_is_requeued_and_finishes(slurm, two_nodes):
    run_dir = two_nodes.root / "slurm"
    arguments = two_nodes.arguments("slurm")

    # A rank of the second node is killed: the job ends, and is not requeued.
    (job,) = submit(slurm, *arguments)
    wait_for_step(slurm, job, run_dir, 1)
    (victim,) = (p for p in ranks_of(run_dir) if p.environ()["SLURM_NODEID"] == "1")
    victim.kill()
    found = slurm.wait(job, "FAILED", "COMPLETED", "CANCELLED", "TIMEOUT")
    text = output(slurm, job)
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("FAILED", "1:0", "0"), text
    assert f"first node {two_nodes.nodes[0].address}:" in text
    assert "was ended by SIGKILL" in text
    assert "the run ended with exit code 1" in text
    assert not ranks_of(run_dir)
    reached = latest_step(run_dir)

    # The same command goes on. Slurm's warning comes: saved, requeued, done.
    (job,) = submit(slurm, *arguments)
    # What is saved is told a step later, and in the last step the signal would come too late.
    wait_for_step(slurm, job, run_dir, reached + 1)
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    found = slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    text = output(slurm, job)
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == (
        "COMPLETED", "0:0", "1",
    ), text  # fmt: skip
    assert "stopped by SIGUSR1 after step" in text
    assert f"saved; requeueing job {job}" in text
    assert f"job {job}, restart 1: 2 nodes (mnode[0-1]) x 1 ranks" in text
    assert [event["restarts"] for event in events(run_dir, "resumed")] == [0, 1]
    assert metrics(run_dir) == two_nodes.undisturbed
    assert (run_dir / "logs" / "rank_00001.log").exists()


def test_a_chain_of_jobs_ends_with_the_first_mistake(slurm, two_nodes):
    command = ("bash", "launch/slurm/chain.sh", "2")
    bad = [*two_nodes.arguments("chain"), "actor.optim.lr=-1"]
    first, second = submit(slurm, *bad, command=command)
    found = slurm.wait(first, "FAILED", "COMPLETED")
    text = output(slurm, first)
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("FAILED", "2:0", "0"), text
    assert "actor.optim.lr is -1" in text
    assert "Traceback" not in text
    slurm.wait(second, "CANCELLED")
    assert not (two_nodes.root / "chain").exists()


def test_a_chain_goes_on_where_a_job_saved_and_a_cancelled_job_saves_and_stays_away(
    slurm, two_nodes
):
    run_dir = two_nodes.root / "chained"
    command = ("bash", "launch/slurm/chain.sh", "2")
    arguments = [*two_nodes.arguments("chained"), "trainer.total_steps=99"]  # never done here
    first, second = submit(slurm, *arguments, command=command)
    wait_for_step(slurm, first, run_dir, 1)
    slurm.run("scancel", "--batch", "--signal=USR1", first)
    found = slurm.wait(first, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    text = output(slurm, first)
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == (
        "COMPLETED", "0:0", "0",
    ), text  # fmt: skip
    assert "the run ended with exit code 75" in text
    assert "saved; the next job of the chain goes on" in text

    reached = int((run_dir / "checkpoints" / "latest").read_text().strip()[5:])
    slurm.wait(second, "RUNNING", "COMPLETED", "FAILED", "CANCELLED")
    wait_for_step(slurm, second, run_dir, reached + 1)
    slurm.run("scancel", second)
    found = slurm.wait(second, "CANCELLED", "COMPLETED", "FAILED", "TIMEOUT")
    text = output(slurm, second)
    assert (found["JobState"], found["Restarts"]) == ("CANCELLED", "0"), text
    assert "stopped by SIGTERM after step" in text
    assert len(events(run_dir, "resumed")) == 1
    assert not ranks_of(run_dir)
