"""Whole runs with planted faults: what guards, the watchdog, signals and restarts make of them.

The in-process engine generates, so a run takes seconds.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tiny_run import make_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

OF_THE_CLOCK = ("timing_s/", "perf/", "rollout/sync_", "reward/overlap")

TIME_LIMIT_S = 900
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
COMMON = [
    "rollout.engine=megatron", "trainer.test_freq=0", "trainer.val_before_train=false",
    "trainer.save_freq=2", "trainer.total_steps=3",
]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    make_run(folder, tie_word_embeddings=False)
    return folder


def faulty_command(
    root: Path, name: str, faults: list[dict[str, Any]], *overrides: str, restarts: int = 0
) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts",
        str(restarts), str(Path(__file__).parent / "faulty_train.py"), json.dumps(faults),
        str(root / "run.yaml"), f"trainer.run_dir={root / name}", *COMMON, *overrides,
    ]  # fmt: skip


def faulty(
    root: Path, name: str, faults: list[dict[str, Any]], *overrides: str, restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    """A run under torchrun; its exit code is always 1 if a rank's is not 0, and shown."""
    return subprocess.run(
        faulty_command(root, name, faults, *overrides, restarts=restarts),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIME_LIMIT_S,
        check=False, env=ENVIRONMENT,
    )  # fmt: skip


def launched(root: Path, name: str, *overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "megappo.launch", "--nproc-per-node", "2", str(root / "run.yaml"),
         f"trainer.run_dir={root / name}", *COMMON, *overrides],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT,
    )  # fmt: skip


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return [
        {k: v for k, v in row.items() if not k.startswith(OF_THE_CLOCK)}
        for row in lines(run_dir / "metrics.jsonl")
    ]


def weights(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "actor_hf" / "model.safetensors").read_bytes()).hexdigest()


def guard_events(run_dir: Path) -> list[dict[str, Any]]:
    return [e for e in lines(run_dir / "events.jsonl") if e["kind"] == "guard"]


@pytest.fixture(scope="module")
def undisturbed(root):
    result = faulty(root, "undisturbed", [])
    assert result.returncode == 0, result.stdout
    return root / "undisturbed"


def test_guards_that_never_fire_change_nothing_bit_for_bit(root, undisturbed):
    off = [f"guard.rules.{name}.action=none" for name in (
        "kl", "grad_norm", "non_finite", "non_finite_again", "out_of_memory", "peak_memory",
    )]  # fmt: skip
    result = faulty(root, "off", [], *off, "guard.snapshot_every=0", "watchdog.timeout_s=0")
    assert result.returncode == 0, result.stdout
    assert metrics(root / "off") == metrics(undisturbed)
    assert weights(root / "off") == weights(undisturbed)
    assert guard_events(undisturbed) == []


FAULTS = [
    {"kind": "nan", "role": "actor", "rank": 1, "update": 1},  # step 1
    {"kind": "nan", "role": "critic", "rank": 0, "update": 2},  # step 2
    {"kind": "spike", "role": "actor", "rank": 1, "update": 4},  # step 3, its first update
    {"kind": "memory", "role": "critic", "rank": 1, "update": 9},  # step 4
    {"kind": "kl", "role": "actor", "rank": 0, "update": 9},  # step 5
]
"""Two updates a step and role; a step that is repeated counts on."""


@pytest.fixture(scope="module")
def disturbed(root):
    result = faulty(
        root, "disturbed", FAULTS, "trainer.total_steps=6", "guard.snapshot_every=1",
        "guard.rules.more_kl={metrics: [actor/ppo_kl], above: 1.0, action: raise_kl_coef, factor: "
        "2}", "guard.rules.look={metrics: [actor/ppo_kl], above: 1.0, action: warn}",
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    return root / "disturbed", result.stdout


def test_each_fault_is_answered_and_the_run_goes_on(disturbed):
    run_dir, screen = disturbed
    events = guard_events(run_dir)
    assert [(e["step"], e["rule"], e["action"]) for e in events] == [
        (1, "non_finite", "skip_update"),
        (2, "non_finite", "skip_update"),
        (3, "grad_norm", "roll_back"),
        (4, "out_of_memory", "halve_micro_batch"),
        (5, "kl", "lower_lr"),
        (5, "more_kl", "raise_kl_coef"),
        (5, "look", "warn"),
    ]
    assert [e["done"] for e in events[2:]] == [
        "back to step 2 from memory, with new sampling seeds",
        "forward passes of 2 samples (actor) and 2 samples (critic); back to step 3 from memory, "
        "with the same seeds",
        "actor's learning rate at most 1e-06",
        "KL coefficients times 2",
        "",
    ]
    assert "rank 1: CUDA out of memory" in events[3]["detail"]
    for event in events:
        assert event["reason"] in screen
    rows = lines(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["training/skipped_updates"] for row in rows] == [1, 1, 0, 0, 0, 0]
    assert [row["guard/actions"] for row in rows] == [0, 1, 3, 4, 4, 6]
    assert rows[5]["actor/lr"] == pytest.approx(1e-6)
    assert rows[5]["critic/lr"] == pytest.approx(1e-3)
    assert all(row["actor/grad_norm"] < 5 for row in rows)


def test_a_skipped_update_leaves_weights_and_schedule_as_they_were_on_all_ranks(disturbed):
    for rank in range(2):
        updates = lines(disturbed[0] / f"updates_{rank}.jsonl")
        for role, number in (("actor", 1), ("critic", 2)):
            of_role = {u["update"]: u for u in updates if u["role"] == role}
            skipped, following = of_role[number], of_role[number + 1]
            assert skipped["norm"] != skipped["norm"]
            assert skipped["after"] == skipped["before"]
            assert skipped["steps"] == of_role[number - 1]["steps"]
            assert following["norm"] > 0
            assert following["after"] != following["before"]
            assert following["steps"] == skipped["steps"] + 1


def test_a_roll_back_starts_from_the_weights_before_and_samples_anew(disturbed, undisturbed):
    run_dir, _ = disturbed
    updates = [u for u in lines(run_dir / "updates_0.jsonl") if u["role"] == "actor"]
    numbers = [u["update"] for u in updates]
    assert 4 not in numbers  # abandoned before it wrote
    before, again = (updates[numbers.index(n)] for n in (3, 5))
    assert again["before"] == before["after"]
    events = guard_events(run_dir)
    assert float(events[2]["reason"].split()[2].rstrip(",")) > 5
    assert metrics(run_dir)[2]["critic/score/mean"] is not None


def test_halved_forward_passes_are_twice_as_many(disturbed):
    updates = lines(disturbed[0] / "updates_1.jsonl")
    passes = [u["passes"] for u in updates]
    assert passes[0] == 2
    assert passes[-1] == 4
    assert set(passes) == {2, 4}


def test_a_run_whose_actions_are_used_up_is_saved_and_stopped_and_can_go_on(root):
    faults = [{"kind": "spike", "role": "actor", "rank": 0, "update": 3}]
    result = faulty(root, "used_up", faults, "guard.max_actions=0", "guard.snapshot_every=1")
    run_dir = root / "used_up"
    assert "exitcode  : 3" in result.stdout
    assert "guard.max_actions (0) are used up, stopped after step 1, state saved" in result.stdout
    assert (run_dir / "checkpoints" / "latest").read_text() == "step_000001\n"
    (event,) = guard_events(run_dir)
    assert (event["step"], event["action"]) == (2, "roll_back")
    assert faulty(root, "used_up", [], "guard.max_actions=0").returncode == 0
    assert [row["step"] for row in metrics(run_dir)] == [1, 2, 3]


def test_without_memory_for_snapshots_a_roll_back_reads_the_checkpoint_on_disk(root, undisturbed):
    """And under tensor parallelism, where an error of one rank alone cannot be mended in place."""
    faults = [
        {"kind": "spike", "role": "critic", "rank": 1, "update": 4},
        {"kind": "memory", "role": "actor", "rank": 1, "update": 4},
    ]
    result = faulty(
        root, "from_disk", faults, "guard.snapshot_every=0", "parallel.tp=2",
        "guard.rules.grad_norm.metrics=[critic/grad_norm]", restarts=1,
    )  # fmt: skip
    run_dir = root / "from_disk"
    assert result.returncode == 0, result.stdout
    back, halved = guard_events(run_dir)
    assert (back["step"], back["action"]) == (3, "roll_back")
    assert back["done"].startswith("back to step 2 from ")
    assert back["done"].endswith("checkpoints/step_000002, with new sampling seeds")
    assert (halved["step"], halved["action"]) == (3, "halve_micro_batch")
    assert "rank 1, before the restart: CUDA out of memory" in halved["detail"]
    (resumed,) = (e for e in lines(run_dir / "events.jsonl") if e["kind"] == "resumed")
    assert (resumed["step"], resumed["restarts"]) == (2, 1)
    assert [row["step"] for row in metrics(run_dir)] == [1, 2, 3]
    assert not list(run_dir.glob("out_of_memory*"))


def test_a_stopped_rank_is_reported_with_its_phase_and_all_ranks_end(root):
    faults = [{"kind": "stop", "role": "actor", "rank": 1, "update": 2}]
    started = time.monotonic()
    result = faulty(root, "hung", faults, "watchdog.timeout_s=20")
    assert result.returncode == 1, result.stdout
    assert time.monotonic() - started < TIME_LIMIT_S - 100
    assert (
        "the run hangs (watchdog.timeout_s 20): the others wait for rank 1 in step 2, phase "
        in (result.stdout)
    )
    report = (root / "hung" / "hang_report.txt").read_text()
    assert "rank 1 in step 2, phase update_actor, which does not answer for" in report
    waiting = report.partition("== rank 0")[2]
    assert "finalize_model_grads" in waiting
    assert "last collective: gloo:" in waiting
    assert "== rank 1" not in report
    (event,) = (e for e in lines(root / "hung" / "events.jsonl") if e["kind"] == "hang")
    assert event["ranks"] == [1]


def test_slow_rewards_are_no_hang_and_an_error_of_one_rank_ends_all(root):
    faults = [
        {"kind": "slow score", "role": "scorer", "rank": 1, "update": 1},
        {"kind": "error", "role": "actor", "rank": 1, "update": 2},
    ]
    result = faulty(root, "error", faults, "watchdog.timeout_s=15")
    assert result.returncode == 1
    assert "hangs" not in result.stdout
    failures = [line for line in result.stdout.splitlines() if " failed: " in line]
    assert failures[0].startswith("rank 1 failed: RuntimeError: a planted error")
    ends = [float(n) for n in _end_times(root / "error")]
    assert max(ends) - min(ends) < 60


def _end_times(run_dir: Path) -> list[float]:
    return [log.stat().st_mtime for log in (run_dir / "logs").glob("rank_*.log")]


def test_slurms_warning_and_the_wall_time_limit_save_and_the_run_goes_on(root, undisturbed):
    run_dir = root / "interrupted"
    process = launched(root, "interrupted", "trainer.max_wall_time_s=0.5")
    screen, _ = process.communicate(timeout=TIME_LIMIT_S)
    assert process.returncode == 75, screen
    assert (
        "stopped by trainer.max_wall_time_s (0.5) after step 0; nothing to save before the first"
    ) in screen
    process = launched(root, "interrupted", "trainer.save_freq=0", "trainer.total_steps=50")
    wait_for(run_dir / "metrics.jsonl", '"step": 1,', process)
    process.send_signal(signal.SIGUSR1)
    screen, _ = process.communicate(timeout=TIME_LIMIT_S)
    assert process.returncode == 75, screen
    assert "stopped by SIGUSR1 after step" in screen
    saved = int((run_dir / "checkpoints" / "latest").read_text().partition("_")[2])
    assert 1 <= saved < 50
    assert [row["step"] for row in metrics(run_dir)] == list(range(1, saved + 1))


def test_a_second_signal_ends_a_run_at_once(root):
    """In the middle of a score that a first signal would wait for, and then save."""
    faults = [{"kind": "slow score", "role": "scorer", "rank": 0, "update": 2}]
    run_dir = root / "twice"
    process = subprocess.Popen(
        faulty_command(root, "twice", faults),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    wait_for(run_dir / "scoring_0", "", process)
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    time.sleep(4)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIME_LIMIT_S)
    assert psutil.wait_procs(ranks, timeout=60)[1] == []
    assert not (run_dir / "checkpoints" / "latest").exists()
    assert [row["step"] for row in metrics(run_dir)] == [1]


@pytest.fixture
def disk(tmp_path):
    """16 MiB of their own to write a run to: a checkpoint has less than one."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(tmp_path)]
    result = subprocess.run(mount, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"no disk can be mounted here: {result.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def on_disk(disk: Path, root: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Four steps, each saved; there is no room from the first update of step 2 to that of 4."""
    faults = [
        {"kind": "disk full", "role": "actor", "rank": 0, "update": 2},
        {"kind": "disk freed", "role": "actor", "rank": 0, "update": 6},
    ]
    return faulty(
        root, str(disk), faults, "trainer.save_freq=1", "trainer.total_steps=4",
        "trainer.rollouts_per_step=2", "checkpoint.keep=4", "checkpoint.async_save=false",
        "checkpoint.export_hf=false", *overrides,
    )  # fmt: skip


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))


def test_a_run_whose_disk_is_full_goes_on_and_saves_again_when_there_is_room(root, disk):
    result = on_disk(disk, root)
    assert result.returncode == 0, result.stdout
    screen = result.stdout.splitlines()
    failed = [line for line in screen if "it is tried again" in line]
    assert len(failed) == 2
    for step, line in zip((2, 3), failed, strict=True):
        assert line.startswith(f"warning    the checkpoint of step {step} failed on rank 0: ")
        assert "; the last checkpoint is " in line
        assert "step_000001; it is tried again" in line
    for name in ("status.json", "rollouts/"):
        told = [line for line in screen if line.startswith(f"warning    {name} cannot be written")]
        assert len(told) == 1, name
    assert checkpoints(disk) == ["step_000001", "step_000004"]
    assert (disk / "checkpoints" / "latest").read_text() == "step_000004\n"
    assert json.loads((disk / "status.json").read_text())["phase"] == "done"


def test_a_full_disk_ends_a_run_that_is_to_stop_and_its_last_checkpoint_stays(root, disk):
    result = on_disk(disk, root, "checkpoint.on_failure=stop")
    assert "exitcode  : 1" in result.stdout
    assert "failed: the checkpoint of step 2 failed on rank 0: " in result.stdout
    assert "step_000001" in result.stdout.partition("; the last checkpoint is ")[2].split()[0]
    assert checkpoints(disk) == ["step_000001"]
    assert (disk / "checkpoints" / "latest").read_text() == "step_000001\n"


def wait_for(path: Path, text: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + TIME_LIMIT_S
    while not (path.exists() and text in path.read_text()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
