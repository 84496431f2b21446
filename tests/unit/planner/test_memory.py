"""Bytes by hand. What real ranks hold is measured in tests/distributed/test_plan_check.py."""

import pytest

from megappo.models.spec import spec_from_config
from megappo.planner import phases
from megappo.planner.activations import Kernels, head_bytes, kept_bytes, layer_bytes
from megappo.planner.constants import DEVICE_RESERVE_BYTES, GPUS
from megappo.planner.layout import Layout, outstanding
from megappo.planner.memory import layout_stages, trained
from megappo.planner.phases import cache_token_bytes, engine, phase_bytes
from megappo.planner.plan import fit
from tests.unit.planner.conftest import OFFLOAD, SERVERS
from tests.unit.planner.published import DEEPSEEK_V3, LLAMA_70B, QWEN3_30B_A3B

LLAMA = spec_from_config(LLAMA_70B)
H100 = GPUS["h100-80gb"]
PARAMETERS = 70_553_706_496
TP8_PP4 = ["parallel.tp=8", "parallel.pp=4", "parallel.sequence_parallel=true"]


def of_all_stages(layout, dtype="bfloat16", spec=LLAMA):
    found = [trained(spec, layout, s, dtype=dtype, head="lm") for s in layout_stages(spec, layout)]
    return [sum(getattr(f, part) for f in found) for part in ("weights", "grads", "optimizer")]


@pytest.mark.parametrize("pp", [1, 4])
@pytest.mark.parametrize(("dtype", "size", "state"), [("bfloat16", 2, 12), ("float32", 4, 8)])
def test_a_parameter_takes_its_dtype_a_float32_gradient_and_its_share_of_state(
    pp, dtype, size, state
):
    found = of_all_stages(Layout(pp=pp, dp=4), dtype)
    wanted = [PARAMETERS * size, PARAMETERS * 4, PARAMETERS * state / 4]
    assert found == pytest.approx(wanted, rel=1e-6)


def test_fsdp_divides_weights_and_gradients_too():
    weights, grads, state = of_all_stages(Layout(dp=8, fsdp=True))
    assert [weights, grads, state] == pytest.approx(
        [PARAMETERS * 2 / 8, PARAMETERS * 4 / 8, PARAMETERS * 12 / 8], rel=1e-6
    )


def test_experts_state_is_shared_by_the_ranks_that_hold_the_same_experts():
    spec = spec_from_config(QWEN3_30B_A3B)
    experts = 48 * 128 * 3 * 768 * 2048
    dense = 30_532_122_624 - experts
    weights, _, state = of_all_stages(Layout(dp=8, ep=4), spec=spec)
    assert weights == pytest.approx(2 * (dense + experts / 4), rel=1e-6)
    assert state == pytest.approx(12 * (dense / 8 + experts / 4 / 2), rel=1e-6)


def test_a_dense_layer_on_cuda_keeps_what_korthikanti_counts():
    """Two norms and two products' inputs, 2 h each; q, k, v and output; MLP of 3 f; scales."""
    kernels = Kernels(dtype="bfloat16")
    h, q, k, f = 8192, 8192, 1024, 28672
    wanted = 2 * (4 * h + 2 * q + 2 * k + 3 * f) + 4 * 2 + 4 * 64
    assert layer_bytes(LLAMA, Layout(), kernels, experts=False) == wanted
    split = 2 * (4 * h + 2 * q + 2 * k + 3 * f) / 8 + (4 * 2 + 4 * 64) / 8
    layout = Layout(tp=8, etp=8, sequence_parallel=True)
    assert layer_bytes(LLAMA, layout, kernels, experts=False) == split
    kept = [
        kept_bytes(LLAMA, Layout(), kernels, recompute, experts=False)
        for recompute in ("none", "selective", "full")
    ]
    assert kept == [wanted, wanted - 4 * 64, 2 * h]


def test_logits_are_held_once_in_the_models_dtype():
    kernels = Kernels(dtype="bfloat16")
    layout = Layout(tp=8, etp=8, sequence_parallel=True)
    norm = (2 * 8192 * 2 + 4) / 8
    assert head_bytes(LLAMA, layout, kernels, "lm") == norm + 128256 / 8 * 2 + 16
    assert head_bytes(LLAMA, layout, kernels, "value") < 2 * norm


@pytest.mark.parametrize(
    ("pp", "vp", "rank", "num_micro", "states"),
    [
        (1, 1, 0, 8, {(1,)}),
        (4, 1, 0, 8, {(4,)}),
        (4, 1, 3, 8, {(1,)}),
        (4, 1, 0, 2, {(2,)}),
        # Two ahead of the last stage, and a group of two on the second chunk: five in all.
        (2, 2, 0, 4, {(3, 2), (4, 1), (2, 3)}),
    ],
)
def test_early_stages_hold_more_micro_batches(pp, vp, rank, num_micro, states):
    found = set(outstanding(pp=pp, vp=vp, rank=rank, num_micro=num_micro))
    assert {sum(state) for state in found} == {sum(next(iter(states)))}
    assert found <= states
    assert outstanding(pp=pp, vp=vp, rank=rank, num_micro=num_micro)[0] in states


def test_the_cache_of_a_token():
    assert cache_token_bytes(LLAMA, tp=1, dtype="bfloat16") == 80 * 2 * 8 * 128 * 2
    # Two ranks share each key-value head from TP 8 on.
    whole = cache_token_bytes(LLAMA, tp=8, dtype="bfloat16")
    assert cache_token_bytes(LLAMA, tp=16, dtype="bfloat16") == whole == 80 * 2 * 128 * 2
    latent = cache_token_bytes(spec_from_config(DEEPSEEK_V3), tp=8, dtype="bfloat16")
    assert latent == 61 * (512 + 64) * 2


def test_an_engine_that_cannot_hold_one_sample_is_named(make_job):
    found = engine(make_job("rollout.tp=2"), H100)
    assert "rollout.tp 2" in found.problem
    assert "141" not in found.problem
    assert "70.6 GB of weights" in found.problem
    assert engine(make_job(), H100).problem == ""
    assert engine(make_job(*SERVERS), H100).share == 0


def test_trained_weights_that_generate_have_one_cache_a_tp_group(make_job):
    job = make_job(
        "parallel.tp=8", "rollout.engine=megatron", "rollout.tp=1", "rollout.sleep=false",
        "rollout.max_running_requests=1000",
    )  # fmt: skip
    # 512 samples of 4,096 tokens over 64 / 8 groups.
    assert engine(job, H100).cache_tokens == 64 * 4096


def test_offloaded_models_are_on_the_device_one_at_a_time(make_job):
    kept = phase_bytes(make_job(*TP8_PP4), H100, 0)
    away = phase_bytes(make_job(*TP8_PP4, *OFFLOAD), H100, 0)
    assert set(away["generate"]) == {"engine", "reserve"}
    for phase, runs in (("update_actor", "actor"), ("update_critic", "critic")):
        other = {"actor": "critic", "critic": "actor"}[runs]
        assert f"{runs} optimizer" in away[phase]
        assert not [part for part in away[phase] if part.startswith((other, "reference"))]
        assert f"{other} optimizer" in kept[phase]
    assert "actor weights" in away["sync"]
    assert "actor optimizer" not in away["sync"]
    assert "reference weights" in away["ref"]


def test_an_engine_that_does_not_sleep_keeps_its_share(make_job):
    awake = phase_bytes(make_job("rollout.sleep=false"), H100, 0)
    asleep = phase_bytes(make_job(), H100, 0)
    share = 0.5 * H100.memory_bytes + phases.ENGINE_RESERVE_BYTES
    assert awake["update_actor"]["engine"] == asleep["generate"]["engine"] == share
    assert asleep["update_actor"]["engine"] == phases.ENGINE_RESERVE_BYTES
    assert asleep["update_actor"]["reserve"] == DEVICE_RESERVE_BYTES


def test_a_problem_names_phase_stage_and_the_largest_part(make_job):
    (problem,) = fit(make_job(*TP8_PP4), H100).problems
    assert "sync needs" in problem
    assert "on stage 0, a h100-80gb has 80; most of it is engine" in problem
    assert not fit(make_job(*TP8_PP4, *OFFLOAD), H100).problems
