"""`megappo plan` as it is typed: tables, JSON, exit codes, and mistakes without a traceback."""

import json
from pathlib import Path

import pytest

from megappo.cli import main
from tests.unit.planner.conftest import OFFLOAD, SERVERS, config_file, save_model
from tests.unit.planner.published import DEEPSEEK_V3, LLAMA_70B, QWEN3_30B_A3B

__all__ = ["config_file", "save_model"]  # fixtures
ROOT = Path(__file__).parents[3]
LAYOUT = ["parallel.tp=8", "parallel.pp=4", "parallel.sequence_parallel=true", *OFFLOAD]


@pytest.fixture
def run(config_file, save_model, capsys):
    folder = save_model(LLAMA_70B)

    def call(*arguments, model=folder):
        code = main(["plan", str(config_file), "--model", model, *arguments])
        out, error = capsys.readouterr()
        return code, out, error

    return call


def test_a_layout_that_fits_is_shown_as_a_table_and_as_json(run):
    code, out, _ = run("--gpus", "64", *LAYOUT)
    assert code == 0
    assert "layout     TP8+SP x PP4 x CP1 x DP2" in out
    assert "fits       yes" in out
    # Of 40 GB an eighth of the matrices and all norms; a token has 80 layers x 2 x 1 head x 128 x 2
    # bytes on each device of rollout.tp 8.
    norms = (2 * 80 + 1) * 8192
    weights = 2 * ((70_553_706_496 - norms) // 8 + norms)
    tokens = (40_000_000_000 - weights) // (80 * 2 * 128 * 2)
    assert f"engine     17.6 GB weights, 22.4 GB cache = {tokens} tokens\n" in out
    for word in ("update_actor", "optimizer", "MFU", "bubble", "tp", "sync"):
        assert word in out
    assert "\nengine " not in run("--gpus", "64", *LAYOUT, *SERVERS)[1]
    code, out, _ = run("--nodes", "8", "--json", *LAYOUT)
    found = json.loads(out)
    assert code == 0
    assert found["fits"] is True
    assert found["devices"] == 64
    assert found["parameters"]["actor"] == 70_553_706_496
    for phase in found["memory_bytes"].values():
        assert phase["total"] == pytest.approx(sum(phase["parts"].values()))
        assert phase["total"] < 80e9
    assert found["step_seconds"] == pytest.approx(sum(found["seconds"].values()))


@pytest.mark.parametrize(
    ("recipe", "model", "gpus"),
    [
        ("llama3.1_70b_gsm8k", LLAMA_70B, 64),
        ("qwen3_30b_a3b_gsm8k", QWEN3_30B_A3B, 32),
    ],
)
def test_recipes_fit_the_devices_that_they_name(save_model, capsys, recipe, model, gpus):
    folder, path = save_model(model, "recipe"), ROOT / "configs" / f"{recipe}.yaml"
    assert main(["plan", str(path), "--model", folder, "--gpus", str(gpus)]) == 0
    assert "fits       yes" in capsys.readouterr().out


def test_a_layout_that_does_not_fit_ends_with_1_and_says_where(run):
    code, out, _ = run("--gpus", "64", *LAYOUT[:3])
    assert code == 1
    assert "fits       no: " in out
    assert "sync needs" in out
    assert run("--gpus", "64", "--gpu", "b200", *LAYOUT[:3])[0] == 0


def test_a_critic_that_an_algorithm_does_not_need_is_not_planned(run):
    arguments = ("--gpus", "64", "--json", *LAYOUT)
    with_critic = json.loads(run(*arguments)[1])
    found = json.loads(run(*arguments, "algorithm.adv_estimator=grpo", "rollout.n=8")[1])
    assert set(found["parameters"]) == {"actor", "reference"}
    assert "update_critic" not in found["seconds"]
    assert set(with_critic["memory_bytes"]) - set(found["memory_bytes"]) == {
        "values",
        "update_critic",
    }
    no_reference = json.loads(run(*arguments, "actor.use_kl_loss=false")[1])
    assert set(no_reference["parameters"]) == {"actor", "critic"}


def test_a_reward_model_is_planned_as_frozen_weights_that_score_while_the_engine_is_awake(
    save_model, capsys
):
    path, folder = ROOT / "configs" / "rlhf_ppo.yaml", save_model(LLAMA_70B, "rlhf")

    def found(*arguments):
        main(["plan", str(path), "--model", folder, "--gpus", "64", "--json", *LAYOUT, *arguments])
        return json.loads(capsys.readouterr().out)

    without = found("rollout.sleep=true", "rollout.tp=8", "reward_model.path=''")
    scored = found("rollout.sleep=true", "rollout.tp=8", f"reward_model.path={folder}")
    assert set(scored["parameters"]) - set(without["parameters"]) == {"reward_model"}
    assert scored["parameters"]["reward_model"] == scored["parameters"]["critic"]
    assert set(scored["memory_bytes"]) - set(without["memory_bytes"]) == {"score"}
    parts = scored["memory_bytes"]["score"]["parts"]
    assert parts["engine"] == scored["memory_bytes"]["generate"]["parts"]["engine"]
    weights = parts["reward_model weights"]
    assert weights == without["memory_bytes"]["values"]["parts"]["critic weights"]
    assert "reward_model gradients" not in parts
    assert "reward_model optimizer" not in parts
    assert "logits" not in parts
    # 256 samples over DP 2 in passes of 128, as many as of two critics' 4 mini-batches of 32 each.
    pair = [f"{role}.micro_batch_size=16" for role in ("critic", "reward_model")]
    times = found(*pair, f"reward_model.path={folder}")["seconds"]
    assert times["score"] == pytest.approx(times["values"])
    assert set(times) - set(without["seconds"]) == {"score"}
    update = scored["memory_bytes"]["update_actor"]["parts"]
    assert update["reward_model weights"] == weights  # not offloaded
    away = found(f"reward_model.path={folder}", "reward_model.param_offload=true")
    assert "reward_model weights" not in away["memory_bytes"]["update_actor"]["parts"]
    assert "reward_model.param_offload=true" in away["overrides"]


def test_a_search_prints_arguments_that_fit_and_reasons(run):
    code, out, _ = run("--gpus", "64", "--search", "--json", "--top", "2")
    found = json.loads(out)
    assert code == 0
    assert len(found["plans"]) == 2
    assert found["num_fitting"] + len(found["refused"]) == found["num_tried"]
    best = found["plans"][0]
    code, out, _ = run("--gpus", "64", "--json", *best["overrides"])
    assert json.loads(out)["step_seconds"] == pytest.approx(best["step_seconds"])
    code, out, _ = run("--gpus", "64", "--search", "--top", "1")
    assert " ".join(best["overrides"]) in out
    assert "refused:" in out


def test_a_search_of_a_recipe_prints_arguments_that_the_recipe_takes(save_model, capsys):
    """The recipe has sequence_parallel on: a layout of TP 1 must switch it off."""
    folder = save_model(LLAMA_70B, "recipe")
    command = ["plan", str(ROOT / "configs" / "llama3.1_70b_gsm8k.yaml"), "--model", folder]
    command += ["--gpus", "64", "--json"]
    assert main([*command, "--search", "--top", "1000"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    one = next(one for one in plans if one["layout"].startswith("TP1 "))
    assert "parallel.sequence_parallel=false" in one["overrides"]
    assert main([*command, *one["overrides"]]) == 0
    assert json.loads(capsys.readouterr().out)["layout"] == one["layout"]


def test_a_search_without_a_layout_ends_with_1_and_what_check_would_refuse_is_said(run, save_model):
    folder = save_model(DEEPSEEK_V3, "deepseek")
    code, out, _ = run("--gpus", "16", "--search", *SERVERS, model=folder)
    assert code == 1
    assert "0 fit" in out
    assert "at its leanest" in out
    assert "warning    megappo check refuses such a run for another reason" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "8", "--gpu", "h100"], "known: h100-80gb, h200, b200, a100-80gb"),
        ([], "either --gpus N or --nodes N"),
        (["--gpus", "8", "--nodes", "1"], "either --gpus N or --nodes N"),
        (["--gpus", "0"], "--gpus is 0: it must be at least 1"),
        (["--gpus", "12"], "--gpus is 12: it must be whole nodes of 8"),
        (["--gpus", "8", "--response-length", "5000"], "rollout.max_response_length (3072)"),
        (["--gpus", "8", "--efficiency", "1.5"], "--efficiency is 1.5: it must lie in (0, 1]"),
        (["--gpus", "8", "parallel.tp=3"], "cannot be split by TP 3"),
        (["--gpus", "8", "parallel.pp=8", "parallel.vpp=16"], "80 layers do not fill 128"),
        (["--gpus", "64", "rollout.tp=16"], "a node has 8 ranks"),
        (["--gpus", "8", "actor.lora.rank=8"], "set actor.lora.rank=0 to plan the whole model"),
        (["--gpus", "8", "parallel.tpp=2"], "parallel.tpp is not a known key"),
    ],
    ids=str,
)
def test_mistakes_end_with_2_and_say_what_to_do(run, arguments, message):
    code, _, error = run(*arguments)
    assert code == 2
    assert message in error


def test_a_folder_without_config_is_named(run, tmp_path):
    code, _, error = run("--gpus", "8", model=str(tmp_path))
    assert code == 2
    assert "has no config.json" in error
