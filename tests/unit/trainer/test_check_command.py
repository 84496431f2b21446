"""`megappo check` finds everything that is wrong in one call, and says what a key is."""

from __future__ import annotations

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megappo.cli import main
from megappo.data.preferences import write_preferences
from tests.tiny_run import make_run


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check")
    make_run(folder)
    rows = pq.read_table(folder / "data" / "train.parquet")
    strange = rows.set_column(
        rows.schema.get_field_index("data_source"),
        "data_source",
        pa.array(["nonsense"] * rows.num_rows),
    )
    pq.write_table(strange, folder / "data" / "strange.parquet")
    shutil.copytree(folder / "model", folder / "other_vocabulary")
    settings = json.loads((folder / "model" / "config.json").read_text())
    settings["vocab_size"] = 1000
    (folder / "other_vocabulary" / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def check(root, capsys):
    def run(*arguments: str) -> tuple[int, str]:
        code = main(["check", str(root / "run.yaml"), *arguments])
        shown = capsys.readouterr()
        return code, shown.out if code == 0 else shown.err

    return run


def problems(text: str) -> list[str]:
    return [line.removeprefix("  - ") for line in text.splitlines() if line.startswith("  - ")]


def test_five_mistakes_of_five_stages_are_seen_in_one_call(root, check):
    code, text = check(
        "--world-size=6",
        "actor.optim.leraning_rate=1",
        "trainer.test_freq=often",
        "rollout.temperature=0",
        "parallel.tp=4",
        f"critic.path={root}/other_vocabulary",
        f"data.train_files=[{root}/data/strange.parquet]",
        f"data.val_files=[{root}/data/none.parquet]",
        "checkpoint.keep=0",
    )
    assert code == 2
    found = problems(text)
    expected = (
        "actor.optim.leraning_rate is not a known key: did you mean actor.optim.lr",
        "trainer.test_freq: Value 'often' of type 'str' could not be converted to Integer",
        "rollout.temperature is 0.0: it must be over 0",
        "checkpoint.keep is 0: it must be over 0",
        "parallel: 6 ranks cannot be split by TP 4",
        "key-value heads must divide over the tensor-parallel ranks: 2 over 4",
        "other_vocabulary: model.embed_tokens.weight has shape",
        "'nonsense'",
        "val file " + f"{root}/data/none.parquet does not exist",
    )
    for text in expected:
        assert sum(text in line for line in found) >= 1, (text, found)
    assert "Traceback" not in text


def test_a_stand_in_for_a_mistaken_value_is_not_complained_about(check):
    # The default of 64 prompts does not divide the batch of 8: that is nobody's mistake.
    code, text = check("actor.mini_batch_size=some")
    assert code == 2
    assert text.startswith("error: actor.mini_batch_size: Value 'some' of type 'str'")
    assert text.count("\n") == 1
    code, text = check("actor.optim.lr=-1")
    assert "actor.optim.lr is -1.0" in text
    # The section of a rule that names no field is left at its defaults; others go on.
    code, text = check("actor.clip_ratio=7", "critic.cliprange_value=-1")
    assert len(problems(text)) == 2
    assert "actor.clip_ratio_low is 7.0" in text


def test_a_missing_model_folder_does_not_hide_the_data(root, check):
    code, text = check(
        "model.path=nowhere", "data.train_files=[none.parquet]", "data.prompt_key=prompts"
    )
    assert code == 2
    found = problems(text)
    assert found[0].startswith("model folder nowhere does not exist")
    assert found[1].startswith("train file none.parquet does not exist")
    assert "needs the columns prompts" in found[2]
    assert len(found) == 3


# Shared case G01: misspelt and misplaced keys, in the file and on the command line.
def test_a_misspelt_key_and_an_added_one_are_refused_with_exit_code_2(check):
    code, text = check("trainer.learning_rat=1e-6", "+actor.foo=1")
    assert code == 2
    assert "trainer.learning_rat is not a known key: did you mean actor.optim.lr" in text
    assert "override '+actor.foo=1': keys cannot be added" in text


# Shared case G02: one validator prints the numbers of both roles.
def test_batches_that_do_not_come_out_are_refused_with_their_numbers(check):
    micro = ("actor.micro_batch_size=4", "critic.micro_batch_size=4", "rollout.n=1")
    code, text = check("data.train_batch_size=2", "actor.mini_batch_size=2", *micro)
    assert code == 2
    for role in ("actor", "critic"):
        assert f"{role}.micro_batch_size is 4: it must divide the 2 samples" in text
    code, text = check("data.train_batch_size=10", "actor.mini_batch_size=10", "--world-size", "4")
    assert code == 2
    assert "10 prompts cannot be shared out evenly over DP 4" in text
    assert "data.train_batch_size 10, rollout.n 4" in text
    code, text = check("parallel.tp=4", "--world-size", "6")
    assert "6 ranks cannot be split by TP 4 x PP 1 x CP 1 = 4" in text
    code, text = check("data.train_batch_size=2", "actor.mini_batch_size=2", "rollout.n=8")
    assert code == 0
    assert "2 prompts x n 8 = 16 samples a step" in text


# Shared case G03: the world is nodes times ranks of a node, and nothing else is guessed.
def test_a_world_that_nodes_do_not_share_evenly_is_refused(check):
    code, text = check("--world-size", "4", "--nodes", "3")
    assert code == 2
    assert "--world-size is 4 and --nodes 3: every node has as many ranks" in text
    code, text = check("--nodes", "2", "rollout.tp=2")
    assert code == 2
    assert "rollout.tp is 2: a node has 1 ranks" in text
    code, text = check("--nodes", "2")
    assert code == 0
    assert "2 ranks = TP 1 x PP 1 x CP 1 x DP 2" in text


def test_without_weights_the_rest_is_checked_and_it_is_said(root, check, tmp_path):
    for file in (root / "model").iterdir():
        if file.suffix == ".json" or file.suffix == ".jinja":
            shutil.copy(file, tmp_path / file.name)
    code, text = check(f"model.path={tmp_path}")
    assert code == 2
    assert "has neither model.safetensors" in text
    code, text = check(f"model.path={tmp_path}", "--no-weights")
    assert code == 0, text
    assert text.endswith("weights were not looked at\n")
    code, text = check(f"model.path={tmp_path}", "--no-weights", "rollout.max_response_length=500")
    assert "256 positions" in text


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("rollout.temperature", ["default   1.0", "it must be over 0", "every log-prob is of"]),
        ("model.dtype", ["allowed   float32, bfloat16", "verl      has no such key"]),
        ("guard.rules.kl.action", ["guard.rules.NAME.action", "skip_update, lower_lr"]),
        ("algorithm.kl_penalty", ["known: k1, kl, abs, k2"]),
        ("loggers", ["known: console, jsonl"]),
        (
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            ["actor.mini_batch_size (in verl: actor_rollout_ref", "type      int", "over 0"],
        ),
        ("actor.optim", ["actor.optim.lr               peak learning rate [1e-06]"]),
        ("data.shuffle", ["allowed   true, false"]),
        (
            "training.center_coef",
            ["training.center_coef (with task: rm or sft)", "default   0.0", "must be 0 or more"],
        ),
        ("data", ["data.train_files ", "\nwith task: rm or sft:\ndata.chosen_key "]),
        ("training", ["training.recompute "]),
    ],
)
def test_a_key_is_explained(capsys, key, expected):
    assert main(["check", "--explain", key]) == 0
    text = capsys.readouterr().out
    for part in expected:
        assert part in text


def test_an_unknown_key_is_answered_with_the_nearest(capsys):
    assert main(["check", "--explain", "actor.clip_ration"]) == 2
    assert "did you mean actor.clip_ratio?" in capsys.readouterr().err
    assert main(["check", "--explain", "training.centr_coef"]) == 2
    assert "did you mean training.center_coef?" in capsys.readouterr().err
    assert main(["check", "--explain", "nonsense"]) == 2
    assert "known: actor, algorithm, " in capsys.readouterr().err
    assert main(["check"]) == 2
    assert "needs CONFIG.yaml, or --explain KEY" in capsys.readouterr().err


@pytest.fixture(scope="module")
def preferences(root):
    write_preferences(root / "preferences", seed=0, num_train=16, num_val=4)
    rows = pq.read_table(root / "preferences" / "train.parquet")
    broken = rows.set_column(1, "chosen", pa.array([*rows["chosen"].to_pylist()[:-1], None]))
    pq.write_table(broken, root / "preferences" / "broken.parquet")
    path = root / "rm.yaml"
    path.write_text(
        f"task: rm\nmodel: {{path: {root}/model, dtype: float32}}\n"
        f"data:\n  train_files: [{root}/preferences/train.parquet]\n"
        f"  val_files: [{root}/preferences/val.parquet]\n"
        "  train_batch_size: 8\n  max_length: 128\n"
        "training: {micro_batch_size: 2}\n"
        f"trainer: {{run_dir: {root}/rm_run}}\n"
    )
    return path


def test_all_mistakes_of_a_reward_model_run_are_seen_in_one_call(preferences, root, capsys):
    code = main(
        [
            "check", str(preferences), "--world-size=3", "--nodes=2", "device=cpu",
            "training.optim.leraning_rate=1", "parallel.tp=3", "model.fp8=e4m3",
            "model.dtype=bfloat16", "data.train_batch_size=7", "checkpoint.keep=0",
            f"data.train_files=[{root}/preferences/broken.parquet]",
            f"data.val_files=[{root}/preferences/none.parquet]",
        ]
    )  # fmt: skip
    assert code == 2
    found = problems(capsys.readouterr().err)
    for part in (
        "training.optim.leraning_rate is not a known key",
        "checkpoint.keep is 0",
        "model.fp8 is 'e4m3': fp8 products are Transformer Engine's",
        "--world-size is 3 and --nodes 2",
        "training.micro_batch_size is 2: it must divide the 7",
        "query heads must divide over the tensor-parallel ranks: 4 over 3",
        "its row 15), column chosen: an answer must be text",
        "val file",
    ):
        assert len([line for line in found if part in line]) == 1, (part, found)
    assert len(found) == 8


@pytest.mark.parametrize("task", ["run", "rm"])
def test_tokens_without_an_embedding_are_named(task, preferences, root, capsys):
    folder = root / "small_vocabulary"
    if not folder.is_dir():
        shutil.copytree(root / "model", folder)
        settings = json.loads((folder / "config.json").read_text())
        # 259 tokens and 261 embeddings fit; 2 fewer than tokens do not.
        assert settings["vocab_size"] == 261
        (folder / "config.json").write_text(json.dumps(settings | {"vocab_size": 257}))
    arguments = [str(root / f"{task}.yaml"), "--no-weights"]
    assert main(["check", *arguments]) == 0
    capsys.readouterr()
    assert main(["check", *arguments, f"model.path={folder}"]) == 2
    text = capsys.readouterr().err
    assert "has tokens that its model has no embedding for" in text
    assert "(257), " in text
    assert "(258); config.json's vocab_size is 257" in text


def test_a_reward_model_run_takes_as_few_ranks_as_nodes_and_layout_allow(preferences, capsys):
    assert main(["check", str(preferences), "--nodes=2", "parallel.tp=2"]) == 0
    shown = capsys.readouterr().out
    assert "parallel   2 ranks = TP 2 x PP 1 x CP 1 x DP 1" in shown
    assert main(["check", str(preferences), "--nodes=4", "parallel.tp=2"]) == 0
    shown = capsys.readouterr().out
    assert "parallel   4 ranks = TP 2 x PP 1 x CP 1 x DP 2" in shown
    assert "16 of 16 train rows" in shown
