"""Published layouts are found feasible; what a run would refuse is refused in its words."""

import shlex

import pytest

from megappo.config.batch_plan import plan_batches
from megappo.models.spec import spec_from_config
from megappo.planner.constants import GPUS
from megappo.planner.plan import fit, overrides
from megappo.planner.report import search_lines
from megappo.planner.search import problems_of, search, summary
from megappo.trainer.plan_command import check_engine_split
from tests.unit.planner.conftest import OFFLOAD, SERVERS
from tests.unit.planner.published import DEEPSEEK_V3, LLAMA_70B, QWEN3_30B_A3B

H100 = GPUS["h100-80gb"]


@pytest.fixture
def find(make_config):
    def run(model, gpus, *more, gpu=H100):
        spec = spec_from_config(model)
        return search(
            make_config(*more),
            dict.fromkeys(("actor", "critic", "reference"), spec),
            gpu,
            world_size=gpus,
            gpus_per_node=8,
            engine_rule=check_engine_split,
        )

    return run


def test_llama_70b_fits_64_h100s_with_tp8_pp4_dp2(make_job, find):
    layout = ["parallel.tp=8", "parallel.pp=4", "parallel.sequence_parallel=true", *OFFLOAD]
    job = make_job(*layout)
    assert (job.layout.tp, job.layout.pp, job.layout.dp) == (8, 4, 2)
    assert not fit(job, H100).problems
    found = find(LLAMA_70B, 64)
    assert "TP8+SP x PP4 x CP1 x DP2" in {plan.job.layout.name for plan in found.plans}


def test_deepseek_v3_is_refused_on_16_and_fits_256(find):
    """Three models of 671B parameters in 16 x 80 GB: weights and gradients alone are 8 TB."""
    small = find(DEEPSEEK_V3, 16, *SERVERS)
    assert not small.plans
    assert {one.kind for one in small.refused} == {"rule", "memory"}
    leanest = min(one.peak_bytes for one in small.refused if one.kind == "memory")
    assert leanest > 12 * 671e9 / 16
    large = find(DEEPSEEK_V3, 256, *SERVERS)
    assert large.plans
    best = large.plans[0]
    assert best.fit.peak <= H100.memory_bytes
    assert best.job.layout.ep > 1


def test_deepseek_v3_in_bfloat16_is_too_large_for_an_engine_on_one_node_of_h100s(find):
    found = find(DEEPSEEK_V3, 256)
    (only,) = found.refused
    assert "rollout.tp 8" in only.reason
    assert found.num_tried == 1


def test_the_best_come_first_and_are_what_the_config_would_be(find, make_job, make_config):
    found = find(QWEN3_30B_A3B, 32)
    seconds = [plan.times.total for plan in found.plans]
    assert seconds == sorted(seconds)
    best = found.plans[0]
    again = make_job(*overrides(best.job), model=QWEN3_30B_A3B, gpus=32)
    assert again.config == best.job.config
    assert fit(again, H100).peak == best.fit.peak


@pytest.mark.parametrize(
    "given",
    [
        [
            *("parallel.tp=2", "parallel.pp=2", "parallel.vpp=2", "parallel.ep=4"),
            *("parallel.etp=2", "parallel.sequence_parallel=true"),
            "parallel.pipeline_layers=[11,13,12,12]",
        ],
        ["parallel.fsdp=true"],
    ],
    ids=["split", "fsdp"],
)
def test_the_arguments_of_a_plan_undo_what_the_config_set(find, make_config, given):
    found = find(QWEN3_30B_A3B, 16, *given)
    kinds = {}
    for one in found.plans:
        layout = one.job.layout
        kinds.setdefault(tuple(degree > 1 for degree in (layout.tp, layout.vp, layout.ep)), one)
    assert len(kinds) > 4
    for one in kinds.values():
        arguments = overrides(one.job, found.given)
        assert make_config(*given, *arguments) == one.job.config  # loading checks all sections
    lines = "\n".join(search_lines(found, top=1))
    assert shlex.join(overrides(found.plans[0].job, found.given)) in lines


def test_a_refusal_is_the_runs_own(find, make_config):
    found = find(LLAMA_70B, 512)
    batch = make_config("parallel.tp=1", "parallel.pp=1")
    _, wanted = plan_batches(batch, 512, local_world_size=8)
    reasons = {one.layout: one.reason for one in found.refused}
    assert reasons["TP1 x PP1 x CP1 x DP512"] == wanted[0]
    rows = summary(found.refused)
    assert sum(count for count, _ in rows) == len(found.refused)
    assert [count for count, _ in rows] == sorted((count for count, _ in rows), reverse=True)


def test_rules_of_models_are_those_of_check(make_config):
    spec = spec_from_config(LLAMA_70B | {"num_key_value_heads": 4})
    config = make_config("parallel.tp=8", "parallel.sequence_parallel=true")
    (problem,) = problems_of(config, {"actor": spec}, world_size=64, gpus_per_node=8)
    assert "key-value heads must divide over the tensor-parallel ranks: 4 over 8" in problem


def test_16384_devices_are_searched(find):
    found = find(LLAMA_70B, 16384, "data.train_batch_size=65536", "actor.mini_batch_size=16384")
    assert found.num_tried > 50
    assert found.plans[0].job.world_size == 16384
