"""Traffic, bubble and roofline by hand."""

import pytest

from megappo.models.spec import spec_from_config
from megappo.planner.constants import DECODE_LATENCY_S, FLOPS_EFFICIENCY, GPUS, MEMORY_EFFICIENCY
from megappo.planner.flops import train_flops
from megappo.planner.layout import Layout
from megappo.planner.parameters import stages
from megappo.planner.phases import engine
from megappo.planner.timing import generate_seconds, times
from megappo.planner.traffic import pass_traffic, push_bytes, step_traffic, update_traffic
from tests.unit.planner.conftest import OFFLOAD, SERVERS
from tests.unit.planner.published import LLAMA_70B, QWEN3_30B_A3B

LLAMA, QWEN = spec_from_config(LLAMA_70B), spec_from_config(QWEN3_30B_A3B)
H100 = GPUS["h100-80gb"]
TP8_PP4 = ["parallel.tp=8", "parallel.pp=4", "parallel.sequence_parallel=true"]


def traffic(spec, layout, tokens=1000):
    (stage, *_) = stages(spec, pp=layout.pp, vp=layout.vp)
    return pass_traffic(spec, layout, stage, tokens=tokens, dtype="bfloat16")


def test_tensor_parallel_ranks_reduce_twice_a_layer_and_gather_once_more_backward():
    hidden = 1000 * 8192 * 2
    plain = traffic(LLAMA, Layout(tp=4, etp=4))
    assert plain.forward["tp"] == 80 * 2 * 2 * hidden * 3 / 4
    assert plain.backward["tp"] == plain.forward["tp"]
    split = traffic(LLAMA, Layout(tp=4, etp=4, sequence_parallel=True))
    assert split.forward["tp"] == plain.forward["tp"]
    assert split.backward["tp"] == 1.5 * plain.forward["tp"]


def test_experts_get_each_token_as_often_as_it_chooses():
    sent = traffic(QWEN, Layout(dp=8, ep=8)).forward["ep"]
    assert sent == 48 * 2 * 8 * (1000 * 2048 * 2) * 7 / 8
    assert traffic(QWEN, Layout(dp=8)).forward["ep"] == 0


def test_context_parallel_ranks_pass_keys_and_values_round_and_stages_hidden_states():
    ring = traffic(LLAMA, Layout(cp=4))
    assert ring.forward["cp"] == 80 * 3 * (2 * 8 * 128) * 1000 * 2
    assert ring.backward["cp"] == 2 * ring.forward["cp"]
    assert traffic(LLAMA, Layout(pp=4)).forward["pp"] == 1000 * 8192 * 2
    assert traffic(LLAMA, Layout(pp=4, vp=2)).forward["pp"] == 2 * 1000 * 8192 * 2


def test_an_update_reduces_float32_gradients_and_gathers_weights(make_job):
    job = make_job(*TP8_PP4)
    exchange = update_traffic(job, "actor", 1)
    elements = 20 * 855_654_400 / 8  # without the two norms a layer, which are not split
    assert exchange.gradients == pytest.approx(elements * 4 / 2, rel=1e-3)
    assert exchange.weights == pytest.approx(elements * 2 / 2, rel=1e-3)
    assert push_bytes(job, 1) == pytest.approx(2 * 70_553_706_496 - 2 * elements, rel=1e-3)
    assert set(step_traffic(job, 1)) == {"tp", "pp", "dp", "sync"}


def test_the_bubble_is_narayanans_and_virtual_stages_divide_it(make_job):
    """128 prompts of a mini-batch on DP 2 are 64 micro-batches: 3 / 64, and 3 / (2 x 64)."""
    found = [
        times(job, H100, engine(job, H100)).bubble
        for job in (make_job(*TP8_PP4), make_job(*TP8_PP4, "parallel.vpp=2"))
    ]
    assert found == [3 / 64, 3 / 128]


def test_no_update_is_faster_than_its_products(make_job):
    job = make_job(*TP8_PP4)
    found = times(job, H100, engine(job, H100))
    least = 512 * train_flops(LLAMA, [4096]) / (64 * H100.flops_per_s * FLOPS_EFFICIENCY)
    assert found.seconds["update_actor"] > least
    assert found.mfu["actor"] < FLOPS_EFFICIENCY
    share = 512 * train_flops(LLAMA, [4096]) / (64 * H100.flops_per_s)
    assert found.mfu["actor"] == pytest.approx(share / found.seconds["update_actor"])
    assert found.total == sum(found.seconds.values())


def test_shorter_responses_and_better_kernels_are_faster(make_job):
    long, short = make_job(*TP8_PP4), make_job(*TP8_PP4, mean_response=1024)
    at_best = times(long, H100, engine(long, H100), efficiency=1.0)
    usual, less = (times(job, H100, engine(job, H100)) for job in (long, short))
    for phase in ("generate", "log_probs", "update_actor"):
        assert less.seconds[phase] < 0.6 * usual.seconds[phase]
        assert at_best.seconds[phase] <= usual.seconds[phase]


def test_decoding_reads_all_weights_for_each_token(make_job):
    """A batch of few: 64 samples on 8 engines; each token reads 141 GB over 8 devices."""
    job = make_job("data.train_batch_size=64", "actor.mini_batch_size=64")
    read = 2 * 70_553_706_496 / 8 / (H100.memory_bytes_per_s * MEMORY_EFFICIENCY)
    least = 3072 * (read + 80 * DECODE_LATENCY_S)
    found = generate_seconds(job, H100, engine(job, H100), speed=H100.flops_per_s)
    assert least < found < 1.5 * least
    assert generate_seconds(make_job(*SERVERS), H100, engine(job, H100), speed=1.0) == 0


def test_offload_costs_time_and_recomputation_too(make_job):
    plain, away = (
        times(job, H100, engine(job, H100)).seconds
        for job in (make_job(*TP8_PP4), make_job(*TP8_PP4, *OFFLOAD))
    )
    assert "offload" not in plain
    assert away["offload"] > 0
    full = make_job(*TP8_PP4, "actor.memory.recompute=full")
    more = times(full, H100, engine(full, H100)).seconds
    assert more["update_actor"] > 1.2 * plain["update_actor"]
    assert more["update_critic"] == plain["update_critic"]


def test_overlap_hides_the_exchange_of_gradients(make_job):
    names = ("parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true")
    plain, hidden = (
        times(job, H100, engine(job, H100)).seconds["update_actor"]
        for job in (make_job(*TP8_PP4), make_job(*TP8_PP4, *names))
    )
    assert hidden < plain
