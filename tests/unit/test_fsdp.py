"""Fully sharded data parallel is refused, with reasons, wherever it was not made for."""

from types import SimpleNamespace

import pytest

from megappo.distributed import fsdp
from megappo.errors import UserError


def transformer_config(**changes):
    values = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "gradient_accumulation_fusion": False,
    }
    return SimpleNamespace(**values | changes)


@pytest.fixture
def with_einops(monkeypatch):
    monkeypatch.setattr(fsdp.importlib.util, "find_spec", lambda name: SimpleNamespace())


def refusal(device="cuda", num_chunks=1, offload=(), **changes):
    with pytest.raises(UserError) as caught:
        fsdp.check(
            device, num_chunks=num_chunks, config=transformer_config(**changes), offload=offload
        )
    return str(caught.value)


@pytest.mark.usefixtures("with_einops")
def test_one_gpu_a_model_is_accepted():
    fsdp.check("cuda", num_chunks=1, config=transformer_config())


@pytest.mark.usefixtures("with_einops")
def test_the_cpu_is_refused_with_what_to_do_instead():
    message = refusal("cpu")
    assert message.startswith("parallel.fsdp is true, but it needs CUDA streams and NCCL")
    assert "on cpu; use device=cuda" in message
    assert "or set parallel.fsdp=false" in message


@pytest.mark.usefixtures("with_einops")
def test_all_broken_rules_are_named_with_their_values():
    message = refusal(
        num_chunks=2,
        tensor_model_parallel_size=4,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=8,
        gradient_accumulation_fusion=True,
    )
    for part in ("parallel.tp is 4", "parallel.pp is 2", "parallel.ep is 8", "2 model chunks"):
        assert part in message
    assert "use no fusion" in message


@pytest.mark.usefixtures("with_einops")
def test_offload_is_refused_with_its_parts():
    message = refusal(offload=("params", "optimizer"))
    assert "params and optimizer shall be offloaded" in message
    assert "offload nothing" in message


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(fsdp.importlib.util, "find_spec", lambda name: None)
    assert "package einops is missing" in refusal()
