"""Whole runs of the command line: real Megatron on two gloo ranks, a real SGLang engine on each."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tiny_run import make_model, make_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

OF_THE_CLOCK = ("timing_s/", "perf/", "rollout/sync_", "reward/overlap")

TIME_LIMIT_S = 900


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder, tie_word_embeddings=False)
    return folder


def command(root: Path, name: str, *overrides: str, ranks: int = 2) -> list[str]:
    return [
        sys.executable, "-m", "megappo.launch", "--nproc-per-node", str(ranks),
        str(root / "run.yaml"), f"trainer.run_dir={root / name}", *overrides,
    ]  # fmt: skip


def train(
    root: Path, name: str, *overrides: str, ranks: int = 2
) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        command(root, name, *overrides, ranks=ranks),
        capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    logs = "\n".join(p.read_text()[-3000:] for p in (root / name / "logs").glob("*.log"))
    assert result.returncode == 0, f"{result.stderr}\n{logs}"
    return result


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """Every step's metrics without what depends on the clock or the machine."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(OF_THE_CLOCK)} for row in rows]


def weights_hash(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "actor_hf" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(root):
    result = train(root, "undisturbed")
    return root / "undisturbed", result.stdout


def test_a_run_leaves_what_the_readme_promises(undisturbed):
    run_dir, screen = undisturbed
    for name in ("config.yaml", "metrics.jsonl", "events.jsonl", "tensorboard", "actor_hf"):
        assert (run_dir / name).exists(), name
    assert (run_dir / "checkpoints" / "latest").read_text() == "step_000004\n"
    samples = [
        json.loads(line)
        for line in (run_dir / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    ]
    assert len(samples) == 16  # rank 0's share: 4 prompts x 4 responses
    assert {"prompt", "response", "score", "finish_reason"} <= samples[0].keys()
    assert samples[0]["prompt"].startswith("<|im_start|>user\n")
    assert "2 ranks = TP 1 x PP 1 x CP 1 x DP 2" in screen
    assert screen.count("\nstep ") == 5  # validation before training, then four steps
    assert "WARNING" not in screen


def test_every_step_has_the_names_that_the_design_fixes(undisturbed):
    rows = [json.loads(line) for line in (undisturbed[0] / "metrics.jsonl").open()]
    assert [r["step"] for r in rows] == [0, 1, 2, 3, 4]
    wanted = {
        "actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/kl_loss", "actor/entropy",
        "actor/grad_norm", "actor/lr", "critic/vf_loss", "critic/vf_clipfrac",
        "critic/vf_explained_var", "critic/score/mean", "critic/rewards/mean",
        "critic/advantages/mean", "response_length/mean", "response_length/clip_ratio",
        "rollout/log_prob_diff_max", "timing_s/generate", "timing_s/score", "timing_s/log_probs",
        "timing_s/update_actor", "timing_s/update_critic", "timing_s/sync", "timing_s/other",
        "timing_s/step", "timing_s/balance", "perf/throughput", "perf/cpu_memory_used_gb",
        "perf/activations_gb/actor", "perf/optimizer_gb/critic", "perf/offloaded_gb",
        "perf/grad_sync_wait_s/actor", "balance/cost_ratio_after", "timing_s/sleep",
        "rollout/engine_restarts", "rollout/aborted", "timing_s/save", "training/failed_saves",
        "rollout/sync_seconds", "rollout/sync_gb", "rollout/sync_verified",
    }  # fmt: skip
    for row in rows[1:]:
        assert wanted <= row.keys()
    assert [("val/score/mean" in r) for r in rows] == [True, False, True, False, True]
    assert rows[0]["val/rows"] == 12
    # guard.check_ranks_every is 2. Actor and critic: embedding, final norm, a head, and in a layer
    # two norms, two attention and two MLP matrices and the bias of query, key and value.
    compared = [r.get("training/compared_tensors") for r in rows]
    assert compared == [None, None, 2 * (3 + 4 * 7), None, 2 * (3 + 4 * 7)]
    # verify_sync is `first`: embedding, norm, head and the last layer's 12 (Qwen2: three biases).
    assert [r["rollout/sync_verified"] for r in rows] == [15, 0, 0, 0, 0]
    assert rows[1]["rollout/sync_gb"] == rows[0]["rollout/sync_gb"] > 0


def test_the_tiny_model_earns_some_reward_so_that_updates_are_real(undisturbed):
    rows = metrics(undisturbed[0])[1:]
    assert any(0 < row["critic/score/mean"] < 1 for row in rows)
    assert all(row["actor/grad_norm"] > 1e-2 for row in rows[1:])


def test_before_the_first_update_of_a_step_the_ratio_is_exactly_one(undisturbed):
    for row in metrics(undisturbed[0])[1:]:
        assert row["actor/first_ratio_diff_max"] == 0.0


def test_engine_and_trainer_agree_on_log_probs_in_every_step(undisturbed):
    for row in metrics(undisturbed[0])[1:]:
        assert 0 < row["rollout/log_prob_diff_max"] < 1e-3
        assert 0 < row["rollout/log_prob_diff_mean"] < row["rollout/log_prob_diff_max"]
        assert 0 <= row["rollout/k3_kl"] < 1e-6
        assert row["rollout/log_prob_diff_over_0.1"] == 0.0
        for level in ("token", "sequence"):
            assert row[f"rollout/eff_sample_size_{level}"] == pytest.approx(1.0, abs=1e-5)
    assert "warning    step" not in undisturbed[1]


def test_corrections_of_a_small_gap_change_little_and_are_reported(root, undisturbed):
    train(
        root, "corrected", "algorithm.rollout_is=token", "algorithm.rollout_rs=sequence",
        "trainer.test_freq=0", "trainer.val_before_train=false",
    )  # fmt: skip
    rows, plain_rows = metrics(root / "corrected"), metrics(undisturbed[0])[1:]
    for found, plain in zip(rows, plain_rows, strict=True):
        assert found["rollout/is_weight_mean"] == pytest.approx(1.0, abs=1e-4)
        assert found["rollout/is_truncated_share"] == 0.0
        assert found["rollout/rs_rejected_share"] == 0.0
        assert found["actor/first_ratio_diff_max"] == 0.0
        for key in ("actor/grad_norm", "critic/grad_norm", "critic/score/mean"):
            assert found[key] == pytest.approx(plain[key], rel=1e-3), key
        assert "rollout/is_weight_mean" not in plain
    assert rows[-1]["actor/pg_loss"] != plain_rows[-1]["actor/pg_loss"]


def test_a_run_against_the_engines_log_probs_with_other_ends_and_a_warning(root):
    """Also: the user's end tokens, a shorter validation, and what a warning leaves behind."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(root / "model", local_files_only=True)
    digits = tokenizer.convert_tokens_to_ids(list("123456789"))
    result = train(
        root, "against_engine", "actor.use_rollout_log_probs=true",
        f"rollout.stop_token_ids={digits}", "rollout.val.max_response_length=1",
        "guard.warn_log_prob_diff=1e-12", "actor.mini_batch_size=8", "trainer.total_steps=1",
        ranks=1,
    )  # fmt: skip
    before, found = metrics(root / "against_engine")
    assert before["val/response_length/mean"] == 1.0
    assert 0 < abs(found["actor/ppo_kl"]) < 1e-4  # before the only update: the gap, and no more
    assert found["actor/first_ratio_diff_max"] == 0.0
    samples = [
        json.loads(line)
        for line in (root / "against_engine" / "rollouts" / "step_000001.jsonl").open()
    ]
    ended = [s for s in samples if s["finish_reason"] == "stop"]
    assert any(s["response_tokens"] == 1 for s in ended)
    assert not any(c.isdigit() for s in samples for c in s["response"][:-1])
    assert "warning    step 1: engine and trainer log-probs differ" in result.stdout
    events = [json.loads(line) for line in (root / "against_engine" / "events.jsonl").open()]
    assert [e["step"] for e in events if e["kind"] == "warning"] == [1]


def test_a_first_update_alone_has_no_clipping_and_no_kl(root):
    """Also: ReMax, whose greedy answers come from the same engines, to a reward of few tokens."""
    short = {"arithmetic": [{"name": "length", "free_tokens": 1, "max_tokens": 3}]}
    train(
        root, "one", "algorithm.adv_estimator=remax", "actor.mini_batch_size=8",
        f"reward.sources={json.dumps(short)}", "trainer.total_steps=1", "trainer.test_freq=0",
    )  # fmt: skip
    row = metrics(root / "one")[1]
    assert "val/score/mean" not in row
    assert row["actor/pg_clipfrac"] == 0.0
    assert row["actor/ppo_kl"] == 0.0
    assert row["actor/first_ratio_diff_max"] == 0.0
    assert row["actor/grad_norm"] > 0
    assert row["critic/score/mean"] < row["critic/baselines/mean"] <= 1  # the model likes to end
    assert row["critic/advantages/mean"] < 0
    assert row["reward/baseline_error_rate"] == 0.0
    assert "critic/vf_loss" not in row


def test_a_killed_run_goes_on_to_the_same_numbers_bit_for_bit(root, undisturbed):
    """First a rank is killed, then the launcher, and the third start goes on to the end."""
    run_dir = root / "killed"
    in_line = "checkpoint.async_save=false"  # so that step 2 is saved when step 3 is logged

    def start() -> subprocess.Popen:
        return subprocess.Popen(
            command(root, "killed", in_line), start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    process = start()
    family = wait_for_step(process, run_dir, step=1)
    rank = rank_of(family, 1)
    rank.kill()
    errors = process.communicate(timeout=180)[1]
    assert psutil.wait_procs(family, timeout=60)[1] == [], "processes outlived the killed rank"
    assert process.returncode == 1
    assert f"rank 1 (process {rank.pid}) was ended by SIGKILL" in errors.splitlines()[-1]

    process = start()
    family = wait_for_step(process, run_dir, step=3)
    process.send_signal(signal.SIGKILL)  # the launcher alone: ranks and engines must follow
    process.wait()
    assert psutil.wait_procs(family, timeout=60)[1] == [], "processes outlived the launcher"
    assert [r["step"] for r in metrics(run_dir)][-1] in (3, 4)  # the kill takes a moment
    assert not (run_dir / "actor_hf").exists()
    resumed = train(root, "killed", in_line)
    assert "resuming   from" in resumed.stdout
    assert metrics(run_dir) == metrics(undisturbed[0])
    assert weights_hash(run_dir) == weights_hash(undisturbed[0])
    kinds = [json.loads(line)["kind"] for line in (run_dir / "events.jsonl").open()]
    assert kinds[-4:] == ["resumed", "pushed", "saved", "exported"]


Kill = tuple[int, str, int, int]
"""Rank, when, weight version, process of the engine: see `killed_train.py`."""


def killed_command(root: Path, name: str, *overrides: str, kills: list[Kill]) -> list[str]:
    plan = [dict(zip(("rank", "when", "version", "process"), k, strict=True)) for k in kills]
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
        str(Path(__file__).parent / "killed_train.py"), json.dumps(plan), str(root / "run.yaml"),
        f"trainer.run_dir={root / name}", "rollout.sync_bucket_bytes=20000", *overrides,
    ]  # fmt: skip


def run_killed(root: Path, name: str, *overrides: str, kills: list[Kill]) -> tuple[int, str]:
    """Exit code and screen; nothing of the run may outlive it."""
    marker = str(root / name)
    done = subprocess.run(
        killed_command(root, name, *overrides, kills=kills),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIME_LIMIT_S,
        check=False, env=os.environ | {"OMP_NUM_THREADS": "1", "MEGAPPO_TEST_RUN": marker},
    )  # fmt: skip
    orphans = [p for p in psutil.process_iter() if is_of_run(p, marker)]
    assert psutil.wait_procs(orphans, timeout=60)[1] == []
    return done.returncode, done.stdout


def is_of_run(process: psutil.Process, marker: str) -> bool:
    try:
        return process.environ().get("MEGAPPO_TEST_RUN") == marker
    except psutil.Error:  # it ended meanwhile, or is somebody else's
        return False


def pop_incidents(rows: list[dict[str, float]]) -> tuple[list[float], list[float]]:
    """Takes restarts and aborted responses out of each step's metrics."""
    restarts = [row.pop("rollout/engine_restarts") for row in rows]
    return restarts, [row.pop("rollout/aborted") for row in rows]


@pytest.fixture(scope="module")
def engines_killed(root):
    """A run that ends with its first engine, and is then continued through three more deaths."""
    run_dir = root / "engines_killed"
    sleeping = "rollout.sleep=true"
    kills = [(1, "generating", 2, 0)]
    code, screen = run_killed(
        root, "engines_killed", sleeping, "rollout.max_restarts=0", kills=kills
    )
    latest = (run_dir / "checkpoints" / "latest").read_text()
    kills = [(1, "generating", 2, 0), (0, "syncing", 4, 0), (1, "asleep", 3, 0)]
    resumed = run_killed(root, "engines_killed", sleeping, kills=kills)
    logs = "\n".join(p.read_text()[-3000:] for p in (run_dir / "logs").glob("rank*.log"))
    assert resumed[0] == 0, f"{resumed[1]}\n{logs}"
    return {"run_dir": run_dir, "code": code, "screen": screen, "latest": latest}


def test_a_run_without_restarts_left_ends_with_the_cause_and_a_checkpoint(engines_killed):
    assert engines_killed["code"] == 1
    assert "exitcode  : 1" in engines_killed["screen"]
    assert (
        "EnginesLost: the engine of rank 1 failed after 0 restarts, and rollout.max_restarts is 0: "
        "SGLang died while generating 16 responses"
    ) in engines_killed["screen"]
    assert engines_killed["latest"] == "step_000001\n"  # save_freq is 2: the failure saved it


def test_a_run_whose_engines_are_killed_has_the_undisturbed_runs_numbers(
    engines_killed, undisturbed
):
    """While generating, in the middle of a push and asleep; then the run is resumed as well."""
    found, expected = metrics(engines_killed["run_dir"]), metrics(undisturbed[0])
    assert pop_incidents(found) == ([0, 0, 1, 2, 0], [0, 0, 16, 0, 0])
    assert pop_incidents(expected) == ([0] * 5, [0] * 5)
    assert found == expected
    assert weights_hash(engines_killed["run_dir"]) == weights_hash(undisturbed[0])


def test_a_restart_of_an_engine_is_an_event_with_rank_and_reason(engines_killed):
    lines = (engines_killed["run_dir"] / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    restarts = [e for e in events if e["kind"] == "engine_restarted"]
    assert [(e["step"], e["rank"]) for e in restarts] == [(2, 1), (3, 0), (3, 1)]
    for event, what in zip(restarts, ("generating", "loading", "resuming"), strict=True):
        assert event["reason"].startswith(f"SGLang died while {what}")
        assert "ended with exit code -9" in event["reason"]
        assert "\n" not in event["reason"]


def test_a_finished_run_says_so_and_ends_well(root, undisturbed):
    before = (undisturbed[0] / "metrics.jsonl").read_text()
    result = train(root, "undisturbed")
    assert (
        "step_000004 has finished 4 steps, as trainer.total_steps says: up to batch 4 of 8 in "
        "epoch 1; raise trainer.total_steps to go on"
    ) in result.stdout
    assert (undisturbed[0] / "metrics.jsonl").read_text() == before


def test_sigterm_saves_and_the_same_command_goes_on(root, undisturbed):
    run_dir = root / "terminated"
    process = subprocess.Popen(
        command(root, "terminated", "trainer.save_freq=0"), start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    family = wait_for_step(process, run_dir, step=1)
    process.terminate()
    screen, _ = process.communicate(timeout=300)
    assert process.returncode == 75, screen
    assert psutil.wait_procs(family, timeout=60)[1] == []
    assert (run_dir / "checkpoints" / "latest").exists()
    train(root, "terminated", "trainer.save_freq=0")
    assert metrics(run_dir) == metrics(undisturbed[0])


def rank_of(family: list[psutil.Process], rank: int) -> psutil.Process:
    """The process that trains as this rank."""
    for process in family:
        with suppress(psutil.Error):  # it ended meanwhile
            if "megappo.train" in process.cmdline() and process.environ().get("RANK") == str(rank):
                return process
    raise AssertionError(f"no rank {rank} among {family}")


def wait_for_step(process: subprocess.Popen, run_dir: Path, *, step: int) -> list[psutil.Process]:
    """Waits until a step is logged; returns the run's processes at that moment."""
    deadline = time.monotonic() + TIME_LIMIT_S
    path = run_dir / "metrics.jsonl"
    while time.monotonic() < deadline:
        assert process.poll() is None, f"ended early with {process.returncode}"
        if path.exists() and f'"step": {step},' in path.read_text():
            return psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
    raise AssertionError(f"no step {step} within {TIME_LIMIT_S} s")


def test_the_exported_actor_loads_offline_in_transformers(undisturbed):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = undisturbed[0] / "actor_hf"
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    ids = tokenizer("2 and 3", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()
    assert tokenizer.chat_template


def test_the_exported_actor_serves_in_sglang_with_transformers_log_probs(undisturbed, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    from megappo.rollout.engine import GenerationRequest
    from megappo.rollout.sampling import SamplingSettings
    from megappo.rollout.sglang_engine import EngineSettings, SGLangEngine

    folder = undisturbed[0] / "actor_hf"
    settings = EngineSettings(
        model_path=folder, log_file=tmp_path / "engine.log", context_length=64,
        device="cpu", dtype="float32", max_running_requests=4,
    )  # fmt: skip
    prompt = (5, 9, 17)
    sampling = SamplingSettings(max_new_tokens=6, temperature=0.0, ignore_eos=True)
    with SGLangEngine(settings) as engine:
        (answer,) = engine.generate(
            [GenerationRequest(token_ids=prompt, seed=1, sampling=sampling)]
        )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[*prompt, *answer.token_ids]])
    with torch.no_grad():
        log_probs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert log_probs.argmax(-1).tolist() == list(answer.token_ids)
    assert log_probs.amax(-1).tolist() == pytest.approx(answer.log_probs, abs=1e-4)


BUDGETS = [
    "actor.use_dynamic_bsz=true", "actor.max_token_len_per_gpu=400",
    "critic.use_dynamic_bsz=true", "critic.max_token_len_per_gpu=300",
]  # fmt: skip
SWITCHES = [
    f"{role}.memory.{switch}"
    for role in ("actor", "critic")
    for switch in ("recompute=full", "param_offload=true", "grad_offload=true",
                   "optimizer_offload=true")
]  # fmt: skip
LAYOUTS = {
    "dp2_balanced": (2, []),
    "tp2": (2, ["parallel.tp=2"]),
    "pp2": (2, ["parallel.pp=2"]),
    "cp2_budget": (2, ["parallel.cp=2", *BUDGETS]),
    "vpp2_switches": (
        2, ["parallel.pp=2", "parallel.vpp=2", *SWITCHES, "reference.param_offload=true"],
    ),
    # One engine of two processes for both replicas, and for the one replica.
    "dp2_rollout2": (2, ["rollout.tp=2"]),
    "tp2_rollout2": (2, ["parallel.tp=2", "rollout.tp=2", "rollout.verify_sync=always"]),
    "tp2_dp2": (4, ["parallel.tp=2", "parallel.sequence_parallel=true"]),
}  # fmt: skip


def one_step(root: Path) -> list[str]:
    """One step whose gradients are not 0 whatever the scores: the reference is another model."""
    return [
        "trainer.total_steps=1", "trainer.test_freq=0", f"reference.path={root / 'other'}",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def unbalanced(root):
    """One step at DP 2, each rank with the samples that it generated."""
    make_model(root / "other", seed=1, tie_word_embeddings=False)
    train(root, "unbalanced", "trainer.balance_batch=false", *one_step(root))
    first = metrics(root / "unbalanced")[1]
    for key in ("actor/grad_norm", "critic/grad_norm", "actor/kl_loss", "actor/reward_kl"):
        assert first[key] > 1e-2, key
    return root / "unbalanced"


def exported(run_dir: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(run_dir / "actor_hf" / "model.safetensors")


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_has_the_same_numbers_in_another_layout(root, undisturbed, unbalanced, name):
    """Same samples (seeds do not depend on ranks), same updates as with DP 2, to the weights.

    An engine of two processes has log-probs that differ by 1e-6 or so, which changes a draw with a
    chance of that order: for these 96 draws the samples are the same, so everything is compared.
    """
    ranks, overrides = LAYOUTS[name]
    train(root, name, *overrides, *one_step(root), ranks=ranks)
    expected, found = metrics(unbalanced)[1], metrics(root / name)[1]
    always = "rollout.verify_sync=always" in overrides
    for key in ("critic/score/mean", "response_length/mean", "prompt_length/mean"):
        assert found[key] == expected[key], key
    assert found["rollout/log_prob_diff_max"] < 1e-3
    assert found["actor/first_ratio_diff_max"] == 0.0
    for key in (
        "critic/grad_norm", "critic/vf_loss", "actor/entropy", "actor/reward_kl",
        "actor/grad_norm", "actor/pg_loss", "actor/kl_loss",
    ):  # fmt: skip
        assert found[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key
    weights = exported(unbalanced)
    for weight, tensor in exported(root / name).items():
        # The step moves them by up to 1e-3.
        assert (tensor - weights[weight]).abs().max() < 5e-6, weight
    raw = json.loads((root / name / "metrics.jsonl").read_text().splitlines()[1])
    plain = json.loads((undisturbed[0] / "metrics.jsonl").read_text().splitlines()[1])
    assert raw["perf/activations_gb/actor"] > 0
    assert raw["rollout/sync_verified"] == (15 if always else 0)
    offloads = name == "vpp2_switches"
    assert (raw["perf/offloaded_gb"] > 0) == (raw["perf/offload_moved_gb"] > 0) == offloads
    assert plain["perf/optimizer_gb/actor"] > 0


def test_an_engine_of_two_processes_may_lose_either_at_any_time(root, unbalanced):
    """While it is loaded, validates, generates and waits: the layout has the same numbers."""
    overrides = [*LAYOUTS["tp2_rollout2"][1], *one_step(root)]
    if not (root / "tp2_rollout2" / "actor_hf").exists():  # that test was not selected
        train(root, "tp2_rollout2", *overrides)
    kills = [
        (0, "syncing", 1, 0), (0, "validating", 1, 1), (0, "generating", 1, 0), (0, "idle", 1, 1),
    ]  # fmt: skip
    code, screen = run_killed(
        root, "pair_killed", *overrides, "rollout.max_restarts=4", kills=kills
    )
    assert code == 0, screen
    found, expected = metrics(root / "pair_killed"), metrics(root / "tp2_rollout2")
    assert pop_incidents(found) == ([2, 2], [12, 32])
    assert pop_incidents(expected) == ([0, 0], [0, 0])
    assert found == expected
    assert weights_hash(root / "pair_killed") == weights_hash(root / "tp2_rollout2")


def test_samples_are_dealt_out_by_cost(undisturbed, unbalanced):
    for row in metrics(undisturbed[0])[1:]:
        assert row["balance/cost_ratio_after"] <= row["balance/cost_ratio_before"]
        assert row["balance/cost_ratio_after"] < 1.05
    assert "balance/cost_ratio_after" not in metrics(unbalanced)[1]


def test_a_mixture_of_experts_trains_under_expert_parallelism(tmp_path):
    """The engine agrees with the trainer after updates, so experts, router and norms arrive."""
    make_run(tmp_path, family="qwen3_moe")
    train(
        tmp_path, "run", "parallel.ep=2", "actor.moe_aux_loss_coeff=0.01", "trainer.total_steps=3",
        "trainer.save_freq=2",
    )  # fmt: skip
    rows = metrics(tmp_path / "run")
    for row in rows[1:]:
        assert 0 < row["rollout/log_prob_diff_max"] < 1e-3
        assert row["actor/first_ratio_diff_max"] == 0.0
        assert row["actor/moe_aux_loss"] > 3.5  # four layers, each 1 at an even load
        assert row["actor/grad_norm"] > 1e-2
    assert rows[3]["actor/entropy"] != rows[1]["actor/entropy"]
    before = weights_hash(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step_000002\n")
    shutil.rmtree(tmp_path / "run" / "actor_hf")
    train(
        tmp_path, "run", "parallel.ep=2", "actor.moe_aux_loss_coeff=0.01", "trainer.total_steps=3",
        "trainer.save_freq=2",
    )  # fmt: skip
    assert metrics(tmp_path / "run") == rows
    assert weights_hash(tmp_path / "run") == before


def test_the_in_process_engine_trains_the_same_on_one_rank_each_and_shared_by_two(
    root, undisturbed
):
    """Under offload and overlapped communication too; greedy validation is as SGLang's."""
    switches = [
        "parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true",
        "actor.memory.param_offload=true",
    ]  # fmt: skip
    found = {}
    for name, overrides in (("own", switches), ("shared", ["parallel.tp=2"])):
        result = train(
            root, f"megatron_{name}", "rollout.engine=megatron", "trainer.total_steps=2",
            "rollout.max_running_requests=12", "checkpoint.export_hf=false", *overrides,
        )  # fmt: skip
        assert "rollout    megatron: the trained weights themselves" in result.stdout
        found[name] = metrics(root / f"megatron_{name}")
    for key in ("val/score/mean", "val/response_length/mean"):
        assert found["own"][0][key] == metrics(undisturbed[0])[0][key], key
    for own, shared in zip(found["own"], found["shared"], strict=True):
        for key in ("val/score/mean", "critic/score/mean", "response_length/mean"):
            assert own.get(key) == shared.get(key), key
        for row in (own, shared):
            assert row["step"] == 0 or row["rollout/log_prob_diff_max"] < 1e-4
            assert row["step"] == 0 or row["actor/first_ratio_diff_max"] == 0.0
    assert found["own"][2]["actor/grad_norm"] > 1e-2
    assert found["shared"][2]["actor/grad_norm"] == pytest.approx(
        found["own"][2]["actor/grad_norm"], rel=1e-4
    )
    assert [row.get("rollout/weight_version") for row in found["own"]] == [None, 2, 3]
    assert found["own"][2]["actor/entropy"] != found["own"][1]["actor/entropy"]
