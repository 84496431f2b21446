"""Configs of `task: rm` and `task: sft`: keys, rules, batch arithmetic."""

import pytest

from megappo.config import ConfigError, SupervisedConfig, dump, load, load_any
from megappo.config.supervised_checks import plan_supervised

BASE = """\
task: rm
model: {path: m}
data: {train_files: [a.parquet], val_files: [b.parquet]}
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "rm.yaml"
    file.write_text(BASE)
    return file


def test_the_task_says_which_kind_of_config_it_is(path, tmp_path):
    config = load_any(path, ["task=sft"])
    assert isinstance(config, SupervisedConfig)
    assert config.task == "sft"
    dump(config, tmp_path / "out.yaml")
    assert load_any(tmp_path / "out.yaml") == config
    with pytest.raises(ConfigError, match=r"task is 'rm'.*megappo train-rm"):
        load(path)


MISTAKES = {
    "unknown task": (["task=dpo"], "task is 'dpo': known: ppo, rm, sft"),
    "unknown key": (["training.optim.learning_rate=1"], "did you mean training.optim.lr"),
    "PPO's key": (["rollout.n=4"], "rollout.n is not a known key"),
    "centring of sft": (["task=sft", "training.center_coef=1"], "training.center_coef is 1.0"),
    "margin of sft": (["task=sft", "data.margin_key=m"], "data.margin_key is 'm'"),
    "negative centring": (["training.center_coef=-1"], "training.center_coef is -1.0"),
    "no files": (["data.train_files=[]"], "data.train_files is"),
    "budget": (
        ["training.use_dynamic_bsz=true", "training.max_token_len_per_gpu=4000"],
        "2 x data.max_length 2048 = 4096 tokens must fit",
    ),
    "PPO's action": (
        ["guard.rules.peak_memory.action=roll_back"],
        "guard.rules.peak_memory.action is 'roll_back'",
    ),
    "fsdp": (
        ["parallel.fsdp=true", "parallel.tp=2"],
        "parallel.tp is 2 and parallel.fsdp is True",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused_by_name(path, name):
    overrides, message = MISTAKES[name]
    with pytest.raises(ConfigError, match=message):
        load_any(path, overrides)


def test_half_the_budget_is_enough_for_single_answers(path):
    given = ["training.use_dynamic_bsz=true", "training.max_token_len_per_gpu=4000"]
    assert load_any(path, ["task=sft", *given]).training.max_token_len_per_gpu == 4000


def test_the_batch_arithmetic_names_both_numbers(path):
    config = load_any(path, ["data.train_batch_size=12", "training.micro_batch_size=3"])
    plan, problems = plan_supervised(config, 2)
    assert not problems
    assert (plan.dp, plan.batch_per_dp_rank, plan.micro_batches) == (2, 6, "2 of 3 pairs")
    assert "12 pairs cannot be shared out evenly over DP 5" in plan_supervised(config, 5)[1][0]
    assert "it must divide the 4 " in plan_supervised(config, 3)[1][0]
    uneven = load_any(path, ["parallel.tp=2"])
    assert "3 ranks cannot be split by TP 2" in plan_supervised(uneven, 3)[1][0]


def test_interleaved_pipelines_need_a_multiple_of_stages(path):
    given = ["parallel.pp=2", "parallel.vpp=2", "data.train_batch_size=9"]
    config = load_any(path, [*given, "training.micro_batch_size=3"])
    assert "must be a multiple of parallel.pp (2)" in plan_supervised(config, 2)[1][0]
