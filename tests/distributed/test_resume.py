"""A checkpoint goes on bit for bit in every layout: chunks, experts, shards find their places.

In the tied model under PP Megatron itself saves the last stage's optimizer state shifted, because
the copy of the embedding has a bucket of its own with padding behind it.
"""

import pytest
import torch

from tests.distributed.launch import run_ranks
from tests.tiny_run import make_run

pytestmark = pytest.mark.distributed

LAYOUTS = {
    "pp2_vp2": ("qwen2", ["parallel.pp=2", "parallel.vpp=2"]),
    "bf16_tp2_sp": (
        "qwen2",
        ["parallel.tp=2", "parallel.sequence_parallel=true", "model.dtype=bfloat16"],
    ),
    "pp2_uneven": ("qwen2", ["parallel.pp=2", "parallel.pipeline_layers=[3,1]"]),
    "cp2": ("qwen2", ["parallel.cp=2"]),
    "dp2_many_buckets": (
        "qwen2",
        ["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"],
    ),
    "ep2": ("qwen3_moe", ["parallel.ep=2"]),
    "moe_pp2_dense_first": ("dense_first", ["parallel.pp=2"]),
    "moe_tp2_sp": ("qwen3_moe", ["parallel.tp=2", "parallel.sequence_parallel=true"]),
}


DENSE_FIRST_STAGE = {"mlp_only_layers": [0, 1]}
"""Then the first stage has no experts, so its expert optimizer is empty."""


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    made = {}
    for family in ("qwen2", "qwen3_moe"):
        folder = tmp_path_factory.mktemp(family)
        made[family] = make_run(folder, family=family)
    folder = tmp_path_factory.mktemp("dense_first")
    made["dense_first"] = make_run(folder, family="qwen3_moe", **DENSE_FIRST_STAGE)
    return made


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_update_from_a_checkpoint_is_the_one_that_would_have_come(configs, tmp_path, name):
    """Into new models, and into models that have trained on.

    Random streams come from it too, and start anew where it was made on another kind of device.
    """
    family, overrides = LAYOUTS[name]
    out = ["--config", str(configs[family]), "--out", str(tmp_path)]
    run_ranks("resume.py", 2, *out, *overrides)
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        expected = found["went_on"]
        assert min(expected["norms"]) > 0
        for kind in ("resumed", "rolled_back"):
            assert found[kind]["norms"] == expected["norms"], kind
            assert found[kind]["lr"] == expected["lr"], kind
            for weight, value in expected["weights"].items():
                assert torch.equal(found[kind]["weights"][weight], value), (kind, weight)
        draws = found["draws"]
        assert draws["cuda_to_cpu"] == draws["cpu_to_cuda"] == draws["restarted"]
        assert draws["cpu_to_cpu"] != draws["restarted"]
