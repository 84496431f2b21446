import pytest

from megappo.config import load
from megappo.config.checks import plan_batches


@pytest.fixture
def make(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {train_files: [t], val_files: [v]}\n")
    return lambda *overrides: load(path, overrides)


def test_the_batch_identities_come_out(make):
    config = make(
        "data.train_batch_size=64",
        "rollout.n=4",
        "actor.mini_batch_size=32",
        "actor.micro_batch_size=16",
        "critic.micro_batch_size=32",
        "actor.ppo_epochs=2",
        "parallel.tp=2",
    )
    plan, problems = plan_batches(config, 4)
    assert problems == []
    assert (plan.dp, plan.samples_per_step, plan.prompts_per_dp_rank) == (2, 256, 32)
    assert plan.samples_per_dp_rank == 128
    assert plan.optimizer_steps_per_step == 4
    assert plan.samples_per_mini_batch_and_dp_rank == 64
    assert (plan.actor_micro_batches, plan.critic_micro_batches) == (4, 2)
    text = "\n".join(plan.lines())
    assert "4 ranks = TP 2 x PP 1 x CP 1 x DP 2" in text
    assert "64 prompts x n 4 = 256 samples a step" in text


def problems_of(config, world_size):
    plan, problems = plan_batches(config, world_size)
    assert plan is None
    return " ".join(problems)


def test_a_world_that_the_layout_does_not_divide_is_refused_with_the_numbers(make):
    text = problems_of(make("parallel.tp=4"), 6)
    assert "6 ranks cannot be split by TP 4 x PP 1 x CP 1 = 4" in text


def test_a_mini_batch_that_dp_does_not_divide_is_refused(make):
    config = make("data.train_batch_size=10", "actor.mini_batch_size=10")
    text = problems_of(config, 4)
    assert "10 prompts cannot be shared out evenly over DP 4" in text
    assert "data.train_batch_size 10, rollout.n 1" in text


def test_a_micro_batch_larger_than_a_mini_batch_is_refused_for_the_actor_and_the_critic(make):
    config = make(
        "data.train_batch_size=2",
        "actor.mini_batch_size=2",
        "actor.micro_batch_size=4",
        "critic.micro_batch_size=4",
    )
    text = problems_of(config, 1)
    assert "actor.micro_batch_size is 4: it must divide the 2 samples" in text
    assert "critic.micro_batch_size is 4: it must divide the 2 samples" in text


def test_responses_a_prompt_count_in_the_micro_batch_rule(make):
    config = make(
        "data.train_batch_size=2",
        "actor.mini_batch_size=2",
        "rollout.n=8",
        "actor.micro_batch_size=16",
        "critic.micro_batch_size=16",
    )
    plan, problems = plan_batches(config, 1)
    assert problems == []
    assert plan.samples_per_mini_batch_and_dp_rank == 16


def test_a_replica_with_more_ranks_than_samples_is_refused(make):
    config = make(
        "data.train_batch_size=2",
        "actor.mini_batch_size=2",
        "actor.micro_batch_size=2",
        "critic.micro_batch_size=2",
        "parallel.pp=4",
    )
    assert "leave some of its 4 model-parallel ranks without a prompt" in problems_of(config, 4)
