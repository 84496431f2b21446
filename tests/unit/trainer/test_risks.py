"""Each warning is given for the choice that it is about, and a plain run has none."""

import json

import pytest

from megappo.config import load
from megappo.config.batch_plan import plan_batches
from megappo.models.spec import spec_from_config
from megappo.trainer.risks import risks

SEVEN_B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "head_dim": 128,
    "norm_topk_prob": True,
}


@pytest.fixture
def warn(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {train_files: [t], val_files: [v]}\n")

    def found(*overrides, world_size=8, per_node=8, steps=100, model=SEVEN_B):
        config = load(path, [*overrides])
        plan, problems = plan_batches(config, world_size, local_world_size=per_node)
        assert plan is not None, problems
        specs = {"actor": spec_from_config(json.loads(json.dumps(model)))}
        return risks(config, specs, plan, total_steps=steps, local_world_size=per_node)

    return found


def test_the_defaults_have_no_risk(warn):
    assert warn() == []


NO_KL = "actor.use_kl_loss=false"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((NO_KL, "actor.clip_ratio_high=0.9"), "nothing holds the policy"),
        ((NO_KL, "actor.optim.clip_grad=0"), "nothing holds the policy"),
        (("actor.optim.clip_grad=0",), "can undo the training"),
        (("actor.clip_ratio_high=0.1",), "entropy collapses"),
        (("algorithm.use_kl_in_reward=true",), "held twice"),
        (("actor.entropy_coeff=0.05",), "texts random"),
        (("algorithm.gamma=0.99",), "the first one sees 5.8e-03"),  # 0.99^512
        (("rollout.temperature=0.3",), "is not the one that is used later"),
        (("actor.optim.lr=1e-8",), "only after about 3,906 optimizer steps"),  # .01 / 256 / 1e-8
        (("actor.optim.lr=1e-4", "critic.optim.lr=1e-4"), "model of width 3584"),
        (("actor.optim.lr_warmup_steps=400",), "the run has 400 optimizer steps: the rate never"),
        (("actor.optim.lr=2e-6",), "lag behind the policy"),
        (("data.val_files=[v,t]",), "measures memory"),
        (("data.truncation=left",), "loses its beginning"),
        (("rollout.gpu_memory_utilization=0.8",), "keeps that share"),
        (("trainer.save_freq=0",), "a crash loses all of it"),
        (("actor.ppo_epochs=20",), "80 optimizer steps follow each generation"),
    ],
)  # fmt: skip
def test_a_risky_choice_is_named_with_its_reason(warn, overrides, expected):
    found = warn(*overrides)
    assert len(found) == 1, found
    assert expected in found[0]


def test_a_critic_that_is_not_trained_is_no_risk(warn):
    risky = "critic.optim.lr_warmup_steps=400"
    assert len(warn(risky)) == 1
    assert warn(risky, "algorithm.adv_estimator=grpo", "rollout.n=4") == []


def test_no_kl_alone_is_no_risk_while_both_clips_hold(warn):
    assert warn(NO_KL) == []


def test_a_mini_batch_of_one_response_is_named(warn):
    one = ("actor.mini_batch_size=1", "actor.micro_batch_size=1", "critic.micro_batch_size=1")
    found = warn(*one, "data.train_batch_size=8", world_size=1, per_node=1)
    assert len(found) == 1
    assert "one response, whose" in found[0]


def test_tensor_parallel_groups_on_two_nodes_are_named(warn):
    found = warn("parallel.tp=4", world_size=8, per_node=2)
    assert len(found) == 1
    assert "parallel.tp is 4 and a node has 2 ranks" in found[0]
    assert warn("parallel.tp=4", world_size=8, per_node=4) == []


def test_experts_on_two_nodes_are_named(warn):
    small = ("actor.micro_batch_size=4", "critic.micro_batch_size=4")
    found = warn("parallel.ep=8", *small, world_size=16, per_node=4, model=SEVEN_B | EXPERTS)
    assert len(found) == 1
    assert "= 8 ranks and a node has 4" in found[0]
