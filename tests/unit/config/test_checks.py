import importlib.util

import pytest

from megappo.config import ConfigError, load
from megappo.config.algorithm_checks import algorithm_warnings
from megappo.config.batch_plan import plan_batches
from megappo.config.checks import check_device_features


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
    assert plan.actor_micro_batches == "4 of 16 samples"
    assert plan.critic_micro_batches == "2 of 32 samples"
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


def test_a_wrong_world_size_hides_no_other_rule_of_it(make):
    urls = ",".join(f"http://server:{port}" for port in range(30000, 30007))
    layout = ("parallel.tp=4", "parallel.ep=4", "parallel.etp=1")
    plan, problems = plan_batches(make(*layout, "rollout.tp=4"), 6)
    assert plan is None
    for expected, problem in zip(
        (
            "6 ranks cannot be split by TP 4 x PP 1 x CP 1 = 4",
            "6 ranks cannot be split by ETP 1 x EP 4 x PP 1 = 4",
            "rollout.tp is 4: 6 ranks cannot be split into engines of 4",
        ),
        problems,
        strict=True,
    ):
        assert expected in problem
    text = problems_of(make("parallel.tp=4", f"rollout.url=[{urls}]"), 6)
    assert "6 ranks cannot be split by TP 4" in text
    assert "rollout.url names 7 servers and there are 6 ranks" in text
    assert problems_of(make("parallel.tp=4", "rollout.tp=4"), 0) == (
        "world size is 0: start at least one rank"
    )


def test_a_mini_batch_that_dp_does_not_divide_hides_no_batch_that_is_too_small(make):
    batch = ("data.train_batch_size=3", "actor.mini_batch_size=3", "parallel.pp=4")
    text = problems_of(make(*batch), 8)
    assert "3 prompts cannot be shared out evenly over DP 2" in text
    assert "1 samples a DP rank leave some of its 4 model-parallel ranks" in text


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


DYNAMIC = ("actor.use_dynamic_bsz=true", "critic.use_dynamic_bsz=true")


def test_a_budget_that_the_longest_sample_does_not_fit_is_refused_with_the_numbers(make):
    lengths = ("data.max_prompt_length=600", "rollout.max_response_length=500")
    with pytest.raises(ConfigError) as error:
        make(*lengths, *DYNAMIC, "actor.max_token_len_per_gpu=1000")
    assert "actor.max_token_len_per_gpu is 1000" in str(error.value)
    assert "600 + rollout.max_response_length 500 = 1100 tokens" in str(error.value)
    assert "critic" not in str(error.value)
    # The budget is of one rank, and two share each sequence.
    make(*lengths, *DYNAMIC, "actor.max_token_len_per_gpu=1000", "parallel.cp=2")


def test_a_budget_is_for_packed_sequences(make):
    with pytest.raises(
        ConfigError, match=r"critic\.use_dynamic_bsz is True.*parallel\.packed=true"
    ):
        make("critic.use_dynamic_bsz=true", "parallel.packed=false")


def test_with_a_budget_the_micro_batch_size_does_not_matter(make):
    config = make("actor.micro_batch_size=7", "critic.micro_batch_size=7", *DYNAMIC)
    plan, problems = plan_batches(config, 1)
    assert problems == []
    assert "actor up to 16384 tokens a rank" in "\n".join(plan.lines())


def test_interleaved_stages_want_a_multiple_of_pp_micro_batches(make):
    layout = ("parallel.pp=2", "parallel.vpp=2", "actor.mini_batch_size=64")
    text = problems_of(make(*layout, "actor.micro_batch_size=64"), 2)
    assert "actor.micro_batch_size is 64: the 1 micro-batches" in text
    assert "multiple of parallel.pp (2)" in text
    plan, problems = plan_batches(make(*layout, "actor.micro_batch_size=32"), 2)
    assert problems == []
    assert "PP 2 (2 chunks a stage)" in plan.lines()[0]


def test_experts_that_the_world_does_not_divide_are_refused(make):
    text = problems_of(
        make("parallel.ep=4", "actor.mini_batch_size=60", "data.train_batch_size=60"), 6
    )
    assert "6 ranks cannot be split by ETP 1 x EP 4 x PP 1 = 4" in text
    config = make("parallel.ep=2", "parallel.tp=2", "parallel.sequence_parallel=true")
    plan, _ = plan_batches(config, 8)
    assert "experts EP 2 x ETP 2" in plan.lines()[0]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (("parallel.vpp=2",), "parallel.vpp is 2: it needs parallel.pp over 1"),
        (
            ("parallel.pp=2", "parallel.pipeline_layers=[4]"),
            "parallel.pipeline_layers is [4]: it must have 2 counts",
        ),
        (
            ("parallel.overlap_param_gather=true",),
            "it needs parallel.overlap_grad_reduce=true",
        ),
        (("model.fp8=hybrid", "model.dtype=float32"), "fp8 products need dtype bfloat16"),
        (("parallel.etp=-1",), "parallel.etp is -1: it must be 0 or more"),
        (("critic.max_token_len_per_gpu=0",), "critic.max_token_len_per_gpu is 0"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(make, override, expected):
    with pytest.raises(ConfigError) as error:
        make(*override)
    assert expected in str(error.value)


def test_fully_sharded_data_parallel_is_for_whole_models_that_stay_on_the_device(make):
    with pytest.raises(ConfigError) as error:
        make("parallel.fsdp=true", "parallel.pp=2", "critic.memory.grad_offload=true")
    assert "parallel.pp is 2 and parallel.fsdp is True" in str(error.value)
    assert "critic.memory.grad_offload is True and parallel.fsdp is True" in str(error.value)


@pytest.mark.parametrize("cut", ["rollout.top_p=0.8", "rollout.top_k=2", "rollout.min_p=0.1"])
@pytest.mark.parametrize(
    ("override", "off"),
    [
        ("actor.use_rollout_log_probs=true", "actor.use_rollout_log_probs=false"),
        ("algorithm.rollout_is=token", "algorithm.rollout_is=none"),
        ("algorithm.rollout_rs=sequence", "algorithm.rollout_rs=none"),
    ],
)
def test_engine_log_probs_of_a_cut_vocabulary_are_refused_in_a_ratio(make, cut, override, off):
    """p = .5, .3, .2 and top_p .8: drawn with ln .625, the trainer has ln .5, a ratio of .8."""
    with pytest.raises(ConfigError) as error:
        make(cut, override)
    text = str(error.value)
    for part in (
        override.split("=")[0] + " is ",
        "rollout.top_p",
        "rollout.top_k",
        "rollout.min_p",
        off,
    ):
        assert part in text
    make(cut)
    make(override)


def test_the_engine_gap_is_not_corrected_twice(make):
    with pytest.raises(ConfigError, match=r"rollout_is is 'token': with actor\.use_rollout_log_pr"):
        make("actor.use_rollout_log_probs=true", "algorithm.rollout_is=token")
    make("actor.use_rollout_log_probs=true", "algorithm.rollout_rs=token")


def test_what_only_cuda_has_is_refused_on_a_cpu(make):
    config = make("model.fp8=hybrid", "parallel.fsdp=true")
    text = " ".join(check_device_features(config, "cpu"))
    assert "model.fp8 is 'hybrid'" in text
    assert "parallel.fsdp is True" in text
    assert check_device_features(config, "cuda") == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.pp=2"], "parallel.pp is 2: rollout.engine megatron"),
        (["parallel.pp=2", "parallel.vpp=2"], "parallel.vpp is 2: rollout.engine megatron"),
        (["parallel.cp=4"], "parallel.cp is 4: .*set parallel.cp=1, or rollout.engine=sglang"),
        (["parallel.ep=2"], "parallel.ep is 2: rollout.engine megatron"),
        (["parallel.tp=2", "parallel.etp=1"], "parallel.etp is 1 and parallel.tp 2: rollout"),
        (["parallel.fsdp=true"], "parallel.fsdp is True: rollout.engine megatron"),
        (["model.fp8=hybrid"], "model.fp8 is 'hybrid': rollout.engine megatron"),
    ],
)
def test_the_in_process_engine_refuses_what_it_cannot_run(make, overrides, message):
    make(*overrides)
    with pytest.raises(ConfigError, match=message):
        make("rollout.engine=megatron", *overrides)


def test_the_in_process_engine_runs_under_tensor_and_sequence_parallelism(make):
    config = make("rollout.engine=megatron", "parallel.tp=2", "parallel.sequence_parallel=true")
    assert config.rollout.engine == "megatron"


def test_an_unknown_engine_is_refused_with_the_known_ones(make):
    with pytest.raises(ConfigError, match=r"rollout\.engine.*'sglang'.*'megatron'"):
        make("rollout.engine=vllm")


def test_an_engines_time_limit_must_end_before_the_collectives_that_wait_for_it(make):
    with pytest.raises(
        ConfigError, match=r"rollout.timeout_s is 1800: .* must be under .*\(1800\)"
    ):
        make("rollout.timeout_s=1800")
    assert make("rollout.timeout_s=1799").rollout.timeout_s == 1799


def test_max_restarts_may_be_0_and_not_less(make):
    assert make("rollout.max_restarts=0").rollout.max_restarts == 0
    with pytest.raises(ConfigError, match=r"rollout.max_restarts is -1: it must be 0 or more"):
        make("rollout.max_restarts=-1")


@pytest.mark.skipif(
    importlib.util.find_spec("torch_memory_saver") is not None, reason="the package is installed"
)
def test_engines_that_sleep_on_cuda_need_the_package_that_releases_memory(make):
    config = make("rollout.sleep=true")
    (problem,) = check_device_features(config, "cuda")
    assert "rollout.sleep is True" in problem
    assert "pip install torch-memory-saver" in problem
    assert check_device_features(config, "cpu") == []
    assert check_device_features(make(), "cuda") == []


def test_engines_that_do_not_fit_the_ranks_or_a_node_are_refused_with_the_numbers(make):
    config = make("rollout.tp=4")
    assert "rollout.tp is 4: 6 ranks cannot be split into engines of 4" in problems_of(config, 6)
    plan, problems = plan_batches(config, 8, local_world_size=2)
    assert plan is None
    assert "rollout.tp is 4: a node has 2 ranks" in problems[0]
    plan, problems = plan_batches(config, 8, local_world_size=4)
    assert problems == []
    assert "2 engines of TP 4" in "\n".join(plan.lines())


def test_an_engine_has_at_least_one_rank(make):
    with pytest.raises(ConfigError, match=r"rollout\.tp is 0"):
        make("rollout.tp=0")


WITHOUT_A_CRITIC = ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax"]


@pytest.mark.parametrize("name", WITHOUT_A_CRITIC)
def test_only_gae_has_a_critic_whose_settings_count(make, name):
    config = make(f"algorithm.adv_estimator={name}", "rollout.n=2", "critic.micro_batch_size=7")
    assert list(config.trained_roles) == ["actor"]
    plan, problems = plan_batches(config, 1)
    assert problems == []
    assert plan.critic_micro_batches == ""
    assert "actor 16 of 8 samples, no critic" in plan.lines()[-1]
    assert list(make().trained_roles) == ["actor", "critic"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.adv_estimator=grpo"], "rollout.n is 1: algorithm.adv_estimator grpo compares"),
        (
            ["algorithm.adv_estimator=rloo", "rollout.n=2", "algorithm.whiten_advantages=true"],
            "algorithm.whiten_advantages is True: with adv_estimator rloo the baseline is the",
        ),
        (
            ["algorithm.adv_estimator=remax", "algorithm.gamma=0.9"],
            "algorithm.gamma is 0.9: adv_estimator remax gives a whole response one advantage",
        ),
        (
            ["algorithm.adv_estimator=reinforce_pp", "algorithm.lam=0.9"],
            "algorithm.lam is 0.9: adv_estimator reinforce_pp has no critic to weigh with",
        ),
        (
            ["algorithm.adv_estimator=reinforce_pp", "algorithm.bootstrap_truncated=true"],
            "algorithm.bootstrap_truncated is True: adv_estimator reinforce_pp has no critic",
        ),
        (
            ["algorithm.adv_estimator=remax", "trainer.critic_warmup=3"],
            "trainer.critic_warmup is 3: algorithm.adv_estimator remax has no critic",
        ),
        (
            ["algorithm.adv_estimator=remax", "critic.path=elsewhere"],
            "critic.path is 'elsewhere': algorithm.adv_estimator remax has no critic",
        ),
        (
            ["algorithm.adv_estimator=remax", "guard.rules.kl.role=both"],
            "guard.rules.kl.role is 'both': algorithm.adv_estimator remax has no critic",
        ),
    ],
)
def test_what_an_estimator_cannot_use_is_refused(make, overrides, message):
    with pytest.raises(ConfigError) as caught:
        make(*overrides)
    assert message in str(caught.value)


def test_whitening_is_the_estimators_own_choice_unless_it_is_set(make):
    whitens = {
        name: make(f"algorithm.adv_estimator={name}", "rollout.n=2").algorithm.whitens
        for name in ["gae", *WITHOUT_A_CRITIC]
    }
    assert [n for n, w in whitens.items() if w] == ["gae", "reinforce_pp", "reinforce_pp_baseline"]
    assert not make("algorithm.whiten_advantages=false").algorithm.whitens


def test_no_lower_bound_is_for_cispo_alone(make):
    assert make("actor.policy_loss=cispo", "actor.clip_ratio_low=1").actor.clip_low == 1
    with pytest.raises(ConfigError, match="clip_ratio_low is 1"):
        make("actor.clip_ratio_low=1")


def test_gspo_with_the_clip_and_the_mean_of_ppo_is_warned_of(make):
    def warnings(*overrides):
        return " ".join(algorithm_warnings(make("actor.policy_loss=gspo", *overrides)))

    assert "1 - 0.2 and 1 + 0.2" in warnings()
    assert "actor.loss_agg_mode is token-mean" in warnings("actor.clip_ratio=0.0003")
    assert not warnings("actor.clip_ratio=0.0003", "actor.loss_agg_mode=seq-mean-token-mean")


def test_dynamic_sampling_by_epochs_is_warned_of(make):
    filtered = ("algorithm.filter_groups=true", "rollout.n=2")
    assert "there will be more" in " ".join(algorithm_warnings(make(*filtered)))
    assert not algorithm_warnings(make(*filtered, "trainer.total_steps=5"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.filter_groups=true"], "rollout.n is 1: algorithm.filter_groups leaves out"),
        (
            ["algorithm.filter_groups=true", "rollout.n=2", "reward_model.path=r"],
            "equal scores, and those of a reward model (reward_model.path 'r') never are",
        ),
        (
            ["rollout.max_response_length=100", "reward.overlong_buffer=120"],
            "reward.overlong_buffer is 120: it lies before rollout.max_response_length (100)",
        ),
        (["reward.overlong_buffer=-1"], "reward.overlong_buffer is -1"),
        (["reward.step_timeout_s=-1"], "reward.step_timeout_s is -1"),
        (["reward.overlong_penalty_factor=0"], "reward.overlong_penalty_factor is 0"),
        (["algorithm.max_sampling_rounds=0"], "algorithm.max_sampling_rounds is 0"),
        (
            ["algorithm.mask_truncated=true", "algorithm.bootstrap_truncated=true"],
            "algorithm.mask_truncated is True: bootstrap_truncated trains on the responses",
        ),
    ],
)
def test_sampling_policies_that_cannot_work_are_refused(make, overrides, message):
    with pytest.raises(ConfigError) as caught:
        make(*overrides)
    assert message in str(caught.value)


KL_RULE = (
    "guard.rules.r={metrics: [actor/ppo_kl], above: 1, action: raise_kl_coef, factor: 2}",
    "actor.use_kl_loss=false",
)
IN_REWARD = "algorithm.use_kl_in_reward=true"


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ([], "no KL is in use"),
        (["actor.use_kl_loss=true", "actor.kl_loss_coef=0"], "no KL is in use"),
        ([IN_REWARD, "algorithm.kl_coef=0"], "algorithm.kl_coef is 0, and times a factor"),
        ([IN_REWARD, "algorithm.kl_ctrl=adaptive"], "algorithm.kl_ctrl adaptive steers against"),
    ],
)
def test_a_rule_that_raises_kl_needs_a_coefficient_that_it_can_raise(make, overrides, why):
    with pytest.raises(ConfigError) as caught:
        make(*KL_RULE, *overrides)
    assert f"guard.rules.r.action is 'raise_kl_coef': {why}" in str(caught.value)


def test_a_rule_that_raises_a_kl_coefficient_over_0_is_taken(make):
    make(*KL_RULE, IN_REWARD)
    make(*KL_RULE, IN_REWARD, "algorithm.kl_ctrl=adaptive", "actor.use_kl_loss=true")
