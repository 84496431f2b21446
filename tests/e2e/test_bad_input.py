"""A user's mistake is one clear message, exit code 2, no traceback, and nothing is written."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tiny_run import make_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("a run") / "with space"
    folder.mkdir()
    make_run(folder)
    write_broken_parts(folder)
    return folder


def write_broken_parts(root: Path) -> None:
    rows = pq.read_table(root / "data" / "train.parquet")
    pq.write_table(rows.drop_columns(["ground_truth"]), root / "data" / "no_truth.parquet")
    pq.write_table(rows.slice(0, 0), root / "data" / "empty.parquet")
    pq.write_table(rows.slice(0, 3), root / "data" / "three.parquet")
    sources = pa.array(["nonsense"] * rows.num_rows)
    index = rows.schema.get_field_index("data_source")
    strange = rows.set_column(index, "data_source", sources)
    pq.write_table(strange, root / "data" / "strange.parquet")
    (root / "data" / "text.parquet").write_text("no parquet at all")
    weightless = root / "weightless"
    weightless.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (weightless / name).write_bytes((root / "model" / name).read_bytes())
    pointer = root / "pointer"
    misfit = root / "misfit"
    for folder in (pointer, misfit):
        folder.mkdir()
        for file in (root / "model").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    (pointer / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    config = json.loads((misfit / "config.json").read_text())
    (misfit / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 8}))
    window = root / "window"
    window.mkdir()
    for file in (root / "model").iterdir():
        (window / file.name).write_bytes(file.read_bytes())
    config = json.loads((window / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    config["layer_types"] = ["sliding_attention"] * 4
    (window / "config.json").write_text(json.dumps(config))


def run(root: Path, command: list[str], *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command, str(root / "run.yaml"), *overrides],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


MISTAKES = {
    "misspelt key": (["actor.optim.leraning_rate=1"], "did you mean"),
    "verl's key": (["data.max_response_length=5"], "here it is rollout.max_response_length"),
    "missing model": (["model.path={root}/nowhere"], "nowhere does not exist"),
    "model without weights": (["model.path={root}/weightless"], "model.safetensors"),
    "unsupported setting": (["model.path={root}/window"], "sliding_attention"),
    "Git-LFS pointer": (["model.path={root}/pointer"], "cannot be read"),
    "another model's weights": (["critic.path={root}/misfit"], "do not fit"),
    "missing data": (["data.train_files=['{root}/data/no.parquet']"], "no.parquet"),
    "no parquet": (["data.train_files=['{root}/data/text.parquet']"], "text.parquet"),
    "wrong column": (["data.val_files=['{root}/data/no_truth.parquet']"], "ground_truth"),
    "wrong prompt key": (["data.prompt_key=question_text"], "question_text"),
    "empty data": (["data.train_files=['{root}/data/empty.parquet']"], "empty"),
    "too few rows": (["data.train_files=['{root}/data/three.parquet']"], "3 < 8"),
    "unknown source": (["data.train_files=['{root}/data/strange.parquet']"], "'nonsense'"),
    "too long prompts": (["data.max_prompt_length=9"], "row 0"),
    "all dropped": (["data.max_prompt_length=9", "data.truncation=drop"], "all dropped"),
    "too many positions": (["rollout.max_response_length=500"], "256 positions"),
    "layout": (["parallel.tp=2"], "1 ranks cannot be split by TP 2"),
    "rollout layout": (["rollout.tp=2"], "1 ranks cannot be split into engines of 2 ranks"),
    "batch": (["actor.micro_batch_size=3"], "it must divide the 16 samples"),
    "two stages": (
        ["rollout.temperature=0", "model.path={root}/nowhere"],
        "2 problems:\n  - rollout.temperature is 0",
    ),
    "stop token": (["rollout.stop_token_ids=[5,99999]"], "rollout.stop_token_ids has [99999]"),
    "too long validation": (
        ["rollout.val.max_response_length=500"],
        "rollout.val.max_response_length 500 = 628",
    ),
    "empty stop": (["rollout.stop=['']"], "a stop string must not be empty"),
    "no world": (["trainer.seed=-1"], "trainer.seed is -1"),
    "no cuda": (["device=cuda"], "finds no CUDA device"),
    "fp8 on a CPU": (["model.fp8=hybrid", "model.dtype=bfloat16"], "model.fp8 is 'hybrid'"),
    "FSDP on a CPU": (["parallel.fsdp=true"], "parallel.fsdp is True: Megatron's"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_training_run_refuses_a_mistake(root, name):
    overrides, expected = MISTAKES[name]
    result = run(root, ["megappo.train"], *(o.format(root=root) for o in overrides))
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: "), result.stderr
    assert expected in result.stderr
    assert not (root / "run").exists()


LAYOUT_MISTAKES = {
    "no experts": (["parallel.ep=2"], "none of the models has experts to spread"),
    "too many chunks": (
        ["parallel.pp=2", "parallel.vpp=4", *["actor.micro_batch_size=2"]],
        "4 layers do not fill 8 pipeline chunks",
    ),
    "wrong counts": (
        ["parallel.pp=2", "parallel.pipeline_layers=[3,2]"],
        "[3, 2] must be 2 counts over 0 (2 stages x 1 chunks) that add up to the model's 4 layers",
    ),
    "a budget that padding passes": (
        ["parallel.tp=2", "parallel.sequence_parallel=true", "actor.use_dynamic_bsz=true",
         "actor.max_token_len_per_gpu=131"],
        "multiples of 2 in this layout, which leaves 130 positions",
    ),
    "FSDP on a CPU": (["parallel.fsdp=true", "device=cpu"], "parallel.fsdp is True"),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUT_MISTAKES)
def test_check_refuses_a_layout(root, name):
    overrides, expected = LAYOUT_MISTAKES[name]
    result = run(root, ["megappo.cli", "check"], "--world-size", "2", *overrides)
    assert (result.returncode, result.stdout) == (2, "")
    assert expected in result.stderr
    assert "Traceback" not in result.stderr


def test_check_refuses_and_accepts_without_touching_anything(root):
    result = run(root, ["megappo.cli", "check"], "actor.clip_ratio=7")
    assert (result.returncode, result.stdout) == (2, "")
    assert "actor.clip_ratio_low is 7.0" in result.stderr
    result = run(root, ["megappo.cli", "check"], "--world-size", "2")
    assert result.returncode == 0, result.stderr
    assert "2 ranks = TP 1 x PP 1 x CP 1 x DP 2" in result.stdout
    assert "2 engines of TP 1" in result.stdout
    assert "ok " in result.stdout
    result = run(root, ["megappo.cli", "check"], "rollout.tp=8", "actor.mini_batch_size=8")
    assert (result.returncode, result.stdout) == (2, "")
    assert "rollout.tp is 8: the actor has 4 attention heads" in result.stderr
    assert not (root / "run").exists()


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        ("actor.optim.leraning_rate=1", "is not a known key"),
        # Only rank 0 reads every prompt: the other rank is joining when it fails.
        ("data.max_prompt_length=9", "  - train row 0 "),
    ],
)
def test_the_launcher_says_a_mistake_once_and_keeps_exit_code_2(root, mistake, expected):
    result = subprocess.run(
        ["bash", "launch/local.sh", "2", str(root / "run.yaml"),
         f"trainer.run_dir={root / 'other'}", mistake],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert result.stderr.count(expected) == 1
    assert "Traceback" not in result.stderr


def test_a_command_without_arguments_shows_its_usage(root):
    for module in ("megappo.train", "megappo.launch", "megappo.cli"):
        result = subprocess.run(
            [sys.executable, "-m", module], capture_output=True, text=True, timeout=300, check=False
        )
        assert result.returncode == 2
        assert "usage" in result.stderr
        assert "Traceback" not in result.stderr
