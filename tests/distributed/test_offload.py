"""Memory switches change where tensors lie and when they travel, never what is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import run_ranks
from tests.tiny_run import make_run

pytestmark = pytest.mark.distributed

SHAPE = ["actor.micro_batch_size=2", "critic.micro_batch_size=2"]
DTYPES = ["float32", "bfloat16"]
Ranks = list[dict[str, Any]]


def run(root: Path, cases: list[str], *overrides: str) -> dict[str, Ranks]:
    """What both ranks saved of each case."""
    out = root / "out"
    out.mkdir()
    run_ranks(
        "offload.py", 2,
        "--config", str(root / "run.yaml"), "--out", str(out), "--cases", *cases,
        "--overrides", *SHAPE, *overrides,
    )  # fmt: skip
    return {
        case: [torch.load(out / f"{case}.{r}.pt", weights_only=True) for r in range(2)]
        for case in cases
    }


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """All cases with DP 2."""
    root = tmp_path_factory.mktemp("offload")
    make_run(root)
    cases = [f"{mode}:{dtype}" for dtype in DTYPES for mode in ("plain", "offload")]
    return run(root, [*cases, "overlap:float32", "broken:float32"])


@pytest.fixture(scope="module")
def plain(ran):
    return {dtype: ran[f"plain:{dtype}"] for dtype in DTYPES}


@pytest.fixture(scope="module")
def offload(ran):
    return {dtype: ran[f"offload:{dtype}"] for dtype in DTYPES}


@pytest.fixture(scope="module")
def overlap(ran):
    return ran["overlap:float32"]


@pytest.fixture(scope="module")
def broken(ran):
    return ran["broken:float32"]


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit."""
    assert found["norms"] == expected["norms"]
    assert torch.equal(found["new"], expected["new"])
    for step, weights in enumerate(expected["exports"]):
        assert found["exports"][step].keys() == weights.keys()
        for name, value in weights.items():
            assert torch.equal(found["exports"][step][name], value), (step, name)
    for name, value in expected["critic"].items():
        assert torch.equal(found["critic"][name], value), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_training_with_offload_between_all_phases_is_bit_equal(plain, offload, dtype):
    for found, expected in zip(offload[dtype], plain[dtype], strict=True):
        assert min(expected["norms"]) > 0.01
        first, second = (e["model.layers.0.mlp.up_proj.weight"] for e in expected["exports"])
        assert not torch.equal(first, second)
        assert_same(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_between_phases_no_model_storage_is_left(offload, dtype):
    """Storages that the test found by itself: buffers, main parameters, moments, the reference."""
    for rank in offload[dtype]:
        # Three scoring passes, four updates, three exports, a pass: each phase is entered empty.
        assert rank["device_bytes"] == [0] * 11
        everything = sum(sum(parts.values()) for parts in rank["part_bytes"].values())
        assert rank["offloaded_bytes"] == everything
        assert rank["loaded_bytes"] == everything


@pytest.mark.parametrize("dtype", DTYPES)
def test_part_bytes_are_those_of_the_elements(plain, offload, dtype):
    """Weights as typed, gradients float32, by halves two moments and for bf16 main weights."""
    per_element = {"float32": (4, 4, 2 * 4 / 2), "bfloat16": (2, 4, 3 * 4 / 2)}[dtype]
    for found, expected in zip(offload[dtype], plain[dtype], strict=True):
        assert found["part_bytes"] == expected["part_bytes"]
        elements = sum(w.numel() for w in expected["exports"][0].values())
        actor = expected["part_bytes"]["actor"]
        for part, size in zip(("params", "grads", "optimizer"), per_element, strict=True):
            # Buffers, and so halves of them, are padded a little.
            assert actor[part] == pytest.approx(size * elements, rel=0.06), part
        reference = expected["part_bytes"]["reference"]
        assert reference["params"] == pytest.approx(per_element[0] * elements, rel=0.06)
        assert reference["grads"] == reference["optimizer"] == 0


def test_moved_bytes_count_what_was_copied(plain, offload):
    for found, expected in zip(offload["float32"], plain["float32"], strict=True):
        assert set(expected["moved_bytes"].values()) == {0}
        # Away, there for one pass, away again.
        reference = found["part_bytes"]["reference"]["params"]
        assert found["moved_bytes"]["reference"] == 3 * reference


def test_a_model_in_host_memory_refuses_every_use(offload):
    for rank in offload["float32"]:
        errors = rank["errors"]
        assert "reference's params" in errors["reference"]
        assert 'load("params")' in errors["actor"]
        assert "actor's params and grads" in errors["zero_grad"]
        assert "actor's params and grads and optimizer" in errors["step"]


def test_overlapped_communication_trains_the_same_weights(plain, overlap):
    """Also right after each step, when with Megatron alone only this rank's share would be new."""
    for found, expected in zip(overlap, plain["float32"], strict=True):
        assert found["buckets"] > 5
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-6)
        for step, weights in enumerate(expected["exports"]):
            for name, value in weights.items():
                torch.testing.assert_close(
                    found["exports"][step][name], value, rtol=0, atol=1e-6, msg=f"{step} {name}"
                )
        torch.testing.assert_close(found["new"], expected["new"], rtol=0, atol=1e-5)


def test_overlapped_gradients_are_still_reduce_scattered_once_a_bucket(plain, overlap):
    for found, expected in zip(overlap, plain["float32"], strict=True):
        # Two models, two steps each.
        assert expected["buckets"] == 1
        assert expected["collectives"]["dist_reduce_scatter_func"] == 4
        assert found["collectives"]["dist_reduce_scatter_func"] == 4 * found["buckets"]
        assert found["collectives"]["dist_all_gather_func"] >= 4 * found["buckets"]
        # Each bucket is padded by itself.
        assert found["collectives"]["dist_reduce_scatter_func_bytes"] == pytest.approx(
            expected["collectives"]["dist_reduce_scatter_func_bytes"], rel=0.1
        )
        assert 0 < found["wait_s"] < 60


def test_a_step_may_leave_the_gather_and_settle_makes_it_up(overlap):
    ranks = [rank["late"] for rank in overlap]
    stale = 0
    for name, before in ranks[0]["before"].items():
        assert torch.equal(ranks[0]["settled"][name], ranks[1]["settled"][name]), name
        assert not torch.equal(ranks[0]["settled"][name], before), name
        # Each element is new on the rank that owns it, and old on the other until then.
        news = [rank["unsettled"][name] == rank["settled"][name] for rank in ranks]
        assert (news[0] | news[1]).all(), name
        stale += int((~news[0]).sum()) + int((~news[1]).sum())
    assert stale > 1000


def test_a_gradient_that_is_not_a_number_is_named_and_changes_nothing(broken):
    for rank in broken:
        assert rank["same"]
        assert "actor's gradient norm is nan" in rank["message"]
        assert "decoder.layers.2.mlp.linear_fc1.weight" in rank["message"]


def test_fully_sharded_data_parallel_is_refused_on_the_cpu(broken):
    for rank in broken:
        assert "parallel.fsdp is true" in rank["refused"]
        assert "device=cuda" in rank["refused"]
        assert "set parallel.fsdp=false" in rank["refused"]


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Norms and the weights at the end, within float32's rounding of another order of sums."""
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-6)
    for name, value in expected["exports"][-1].items():
        torch.testing.assert_close(found["exports"][-1][name], value, rtol=0, atol=1e-6, msg=name)


def test_switches_are_right_in_a_pipeline(tmp_path):
    """Stages start their reductions together, after the last backward pass."""
    make_run(tmp_path)
    cases = ["plain:float32", "overlap:float32", "offload:float32"]
    ran = run(tmp_path, cases, "parallel.pp=2")
    for expected, overlap, offload in zip(*ran.values(), strict=True):
        assert_close(overlap, expected)
        assert_same(offload, expected)


def make_experts(folder: Path) -> None:
    """A mixture of experts in place of the run's model, with the same vocabulary."""
    from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    dense = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=dense.vocab_size,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=dense.eos_token_id,
        )
    ).float()
    model.save_pretrained(folder)


def test_switches_are_right_for_experts_with_their_own_optimizer(tmp_path):
    """EP 2: experts have buffers and an optimizer of their own, chained to the dense one."""
    make_run(tmp_path)
    make_experts(tmp_path / "model")
    cases = ["plain:float32", "overlap:float32", "offload:float32"]
    ran = run(tmp_path, cases, "parallel.ep=2")
    for expected, overlap, offload in zip(*ran.values(), strict=True):
        assert expected["optimizers"] == 2
        assert_close(overlap, expected)
        assert_same(offload, expected)
        assert offload["device_bytes"] == [0] * 11
        assert offload["loaded_bytes"] == offload["offloaded_bytes"] > 10_000
