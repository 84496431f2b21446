"""What the doctor sees is what the machine has; what a run lacks is named with its remedy."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from megappo.cli import main
from megappo.config import load, load_any
from megappo.distributed.network import Network, Pair, rounds
from megappo.doctor import machine, needs
from megappo.doctor.machine import Gpu
from megappo.rollout.file_limit import NEEDED_FILES, file_limit_warning, raise_file_limit

TINY = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
TINY_WEIGHTS = 80 + 256 + 384 + 24
"""embedding, q k v o 4 x 64, MLP 3 x 128, three norms of 8"""


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{path: {tmp_path}/m}}\ndata: {{train_files: [t], val_files: [v]}}\n"
        f"trainer: {{run_dir: {tmp_path}/run}}\n"
    )
    return path


def lines_of(config, found, *, ranks=1, environment=None):
    lines = needs.needs(config, found, ranks=ranks, environment=environment or {})
    return {line.what: line for line in lines}


def test_the_facts_are_the_machines():
    found = machine.look()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert (found.open_files_soft, found.open_files_hard) == limits
    assert found.shm_bytes == shutil.disk_usage("/dev/shm").total
    assert found.num_cpus == len(os.sched_getaffinity(0))
    assert found.packages["megatron-core"] == "0.16.1"
    assert "no-such-package" not in found.packages
    assert 0 < found.available_bytes <= found.memory_bytes
    assert found.ports == (21000, 21031)
    assert 0 <= found.num_free_ports <= 32
    assert machine.look(ranks=3).ports == (21000, 21095)


def test_a_drivers_version_is_read(tmp_path):
    path = tmp_path / "version"
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
        "GCC version:  gcc version 12.3.0\n"
    )
    assert machine.driver_version(path) == "570.86.15"
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Tue Mar 5\n")
    assert machine.driver_version(path) == "535.161.08"
    assert machine.driver_version(tmp_path / "none") == ""


def test_a_cpu_run_lacks_nothing_here_and_a_cuda_run_what_cuda_needs(config_file):
    here = replace(machine.look(), gpus=(), driver="", cuda="", nccl="")
    config = load(config_file, ["device=cpu"])
    assert [w for w, line in lines_of(config, here).items() if line.state == "missing"] == []
    config = load(config_file, ["device=cuda", "rollout.sleep=true", "model.fp8=e4m3"])
    found = lines_of(config, here, ranks=2)
    for what in ("GPUs", "driver", "CUDA build of PyTorch", "NCCL", "transformer-engine"):
        assert found[what].state == "missing"
        assert found[what].remedy
    with_gpus = replace(
        here,
        gpus=(Gpu(name="A100", memory_bytes=80 * 2**30, capability="8.0"),) * 2,
        driver="570.86.15",
        cuda="13.0",
        nccl="2.28.3",
        packages=here.packages
        | {"sglang-kernel": "0.4.10", "torch-memory-saver": "1", "transformer-engine": "2.11.0"},
    )
    found = lines_of(config, with_gpus, ranks=2)
    missing = [what for what, line in found.items() if line.state == "missing"]
    assert missing == ["fp8 products"]
    assert found["fp8 products"].found == "compute 8.0"
    assert lines_of(config, with_gpus, ranks=3)["GPUs"].found == "2 (A100) for 3 ranks"
    other = replace(with_gpus, packages=with_gpus.packages | {"apex": "0.9.10.dev0"})
    assert lines_of(config, other)["apex"].state == "missing"
    assert lines_of(config, replace(other, apex_is_nvidias=True))["apex"].state == "ok"


@pytest.mark.parametrize(
    ("package", "version", "state"),
    [
        ("sglang", "0.5.22", "missing"),
        ("sglang", "0.5.23+local", "ok"),
        ("sglang-kernel", "0.4.9", "missing"),
        ("sglang-kernel", "0.4.10+cu130", "ok"),
        ("transformer-engine", "2.8.0", "missing"),
        ("transformer-engine", "2.10.0+abc", "ok"),
        ("transformer-engine", "2.12", "missing"),
        ("transformer-engine", "1", "missing"),
        ("torch-memory-saver", "0.0.1", "ok"),
    ],
)
def test_a_package_of_an_untested_version_is_missing(config_file, package, version, state):
    here = machine.look()
    config = load(config_file, ["device=cuda", "rollout.sleep=true"])
    line = lines_of(config, replace(here, packages=here.packages | {package: version}))[package]
    assert (line.state, line.found) == (state, version)
    assert bool(line.remedy) is (state == "missing")


def test_a_run_without_engines_of_its_own_needs_nothing_of_theirs(config_file):
    small = replace(machine.look(), shm_bytes=0, shm_free_bytes=0)
    engines = {"sglang", "free ports"}
    assert engines <= set(lines_of(load(config_file, ["device=cpu"]), small))
    for without in ("rollout.engine=megatron", "rollout.url=http://server:30000"):
        found = lines_of(load(config_file, ["device=cpu", without]), small)
        assert not engines & set(found)
        assert found["shared memory"].state == "ok"


def test_what_is_too_small_is_named_with_both_numbers(config_file):
    here = machine.look()
    config = load(config_file, ["device=cpu"])
    # Two buckets of 64 MiB a rank: four ranks need 512 MiB.
    small = replace(here, shm_bytes=2**26, shm_free_bytes=2**26)
    line = lines_of(config, small, ranks=4)["shared memory"]
    assert (line.state, line.found) == ("missing", "64 MiB free of 64 MiB, 512 MiB needed")
    few = replace(here, open_files_soft=256, open_files_hard=1024)
    assert lines_of(config, few)["open files"].state == "missing"
    enough = replace(here, open_files_soft=256, open_files_hard=NEEDED_FILES)
    assert lines_of(config, enough)["open files"].state == "ok"
    old = replace(here, packages=here.packages | {"megatron-core": "0.15.0"})
    assert lines_of(config, old)["megatron-core"].state == "missing"


def test_a_checkpoints_size_counts_both_models_with_adams_state(config_file, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(TINY))
    config = load(config_file)
    assert needs.checkpoint_bytes(config) == 2 * TINY_WEIGHTS * (2 + 12)
    full = load(config_file, ["model.dtype=float32"])
    assert needs.checkpoint_bytes(full) == 2 * TINY_WEIGHTS * (4 + 12)
    alone = load(config_file, ["algorithm.adv_estimator=grpo", "rollout.n=2"])
    assert needs.checkpoint_bytes(alone) == TINY_WEIGHTS * (2 + 12)
    # Rank 2: q k v 8 + 24, o 8 + 8, gate and up 8 + 32, down 16 + 8.
    adapters = 2 * (32 + 16 + 40 + 24)
    lora = load(config_file, ["actor.lora.rank=2"])
    assert needs.checkpoint_bytes(lora) == (adapters + TINY_WEIGHTS) * (2 + 12)
    both = load(config_file, ["actor.lora.rank=2", "critic.lora.rank=2"])
    assert needs.checkpoint_bytes(both) == (2 * adapters + 8) * (2 + 12)


def test_a_reward_model_run_needs_no_engines(config_file, tmp_path, capsys):
    config_file.write_text("task: rm\n" + config_file.read_text())
    assert main(["doctor", str(config_file), "device=cpu", "--json"]) == 0
    found = {line["what"] for line in json.loads(capsys.readouterr().out)["needs"]}
    assert {"device", "megatron-core", "shared memory", "disk of run_dir"} <= found
    assert not found & {"sglang", "free ports", "open files"}
    assert main(["doctor", str(config_file), "--network"]) == 2
    assert "measures between ranks and there is 1" in capsys.readouterr().err
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(TINY))
    cuda = load_any(config_file, ["device=cuda"])
    assert needs.checkpoint_bytes(cuda) == TINY_WEIGHTS * (2 + 12)  # and no critic's
    lines = lines_of(cuda, machine.look(), ranks=2)
    assert "transformer-engine" in lines
    assert "sglang-kernel" not in lines
    assert "1,024 MiB needed" in lines["shared memory"].found


# Shared case G03: an address that is not known is never replaced by localhost.
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SLURM_NNODES": "2"}, "not set, and there are 2 nodes"),
        ({"SLURM_NNODES": "2", "MASTER_ADDR": "no-such-host.invalid"}, "cannot be resolved"),
        ({"NNODES": "4", "MASTER_ADDR": "localhost"}, "localhost is 127.0.0.1"),
    ],
)
def test_several_nodes_need_the_address_of_the_first(config_file, environment, expected):
    line = lines_of(load(config_file), machine.look(), environment=environment)["MASTER_ADDR"]
    assert line.state == "missing"
    assert expected in line.found


def test_one_node_needs_no_address(config_file):
    for environment in ({}, {"NNODES": "1"}, {"NNODES": "2", "MASTER_ADDR": "192.0.2.7"}):
        line = lines_of(load(config_file), machine.look(), environment=environment)
        assert line.get("MASTER_ADDR") is None or line["MASTER_ADDR"].state == "ok"


def test_the_command_answers_with_json_and_exit_codes(config_file, capsys):
    assert main(["doctor", str(config_file), "device=cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["missing"] == []
    assert found["machine"]["packages"]["sglang"] == "0.5.23"
    assert main(["doctor", "--ranks", "2"]) == 0
    shown = capsys.readouterr().out
    assert "/dev/shm" in shown
    assert re.search(r"^ports of engines +21000 to 21063, \d+ of 64 free$", shown, re.MULTILINE)
    code = main(["doctor", str(config_file), "device=cuda"])
    text = capsys.readouterr().out
    assert code == (1 if "missing:" in text else 0)
    assert main(["doctor", str(config_file), "devise=cpu"]) == 2
    assert "devise is not a known key" in capsys.readouterr().err
    assert main(["doctor", "--network"]) == 2
    assert main(["doctor", str(config_file), "--network"]) == 2
    assert "measures between ranks and there is 1" in capsys.readouterr().err
    assert main(["doctor", "--ranks", "0"]) == 2


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("parallel.ep=8", "4 ranks cannot be split by ETP 1 x EP 8 x PP 1 = 8"),
        ("parallel.tp=3", "4 ranks cannot be split by TP 3"),
    ],
)
def test_a_layout_that_does_not_divide_the_ranks_is_refused_before_they_meet(
    config_file, capsys, monkeypatch, layout, expected
):
    place = {
        "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    }  # fmt: skip
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", str(config_file), "--network", "device=cpu", layout]) == 2
    assert expected in capsys.readouterr().err


# Shared case G05: a process raises its own limit, and says where that is not enough.
@pytest.mark.parametrize(("hard", "expected"), [(8192, 8192), (300, 300)])
def test_the_limit_of_open_files_is_raised_as_far_as_it_goes(hard, expected):
    program = (
        "import resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))\n"
        "from megappo.rollout.file_limit import raise_file_limit\n"
        "print(raise_file_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.split() == [str(expected)] * 2
    assert bool(file_limit_warning(expected)) is (expected < NEEDED_FILES)


def test_a_limit_that_is_high_enough_is_left_alone():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert raise_file_limit(wanted=64) == before[0]
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7, 8])
def test_each_pair_meets_once_and_nobody_twice_in_a_round(num_ranks):
    met = []
    for partners in rounds(num_ranks):
        assert all(partners[other] == one for one, other in partners.items())
        met += [(one, other) for one, other in partners.items() if one < other]
    expected = [(a, b) for a in range(num_ranks) for b in range(a + 1, num_ranks)]
    assert sorted(met) == expected


def network(seconds):
    pairs = tuple(Pair(ranks=ranks, seconds=s) for ranks, s in seconds.items())
    return Network(hosts=("a", "a", "b", "b"), speeds=(), pairs=pairs, pair_bytes=1)


EVEN = dict.fromkeys([(0, 1), (2, 3)], 1.0) | dict.fromkeys([(0, 2), (0, 3), (1, 2), (1, 3)], 10.0)


def test_a_slow_link_is_told_from_a_slow_rank_and_hosts_from_networks():
    assert network(EVEN).slow_pairs() == []
    found = network(EVEN | {(1, 2): 35.0})
    assert [pair.ranks for pair in found.slow_pairs()] == [(1, 2)]
    assert found.slow_rank() is None
    found = network(EVEN | {(0, 2): 35.0, (1, 2): 80.0, (2, 3): 9.0})
    assert [pair.ranks for pair in found.slow_pairs()] == [(2, 3), (1, 2), (0, 2)]
    assert found.slow_rank() == 2
