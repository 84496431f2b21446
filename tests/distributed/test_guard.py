"""One rank's NaN is every rank's skipped update; a copy in memory brings a state back exactly."""

import pytest
import torch

from tests.distributed.launch import run_ranks
from tests.tiny_run import make_run

pytestmark = pytest.mark.distributed

OFFLOADS = [
    f"{role}.memory.{part}_offload=true"
    for role in ("actor", "critic")
    for part in ("param", "grad", "optimizer")
]
LAYOUTS = {
    "dp2_many_buckets": (
        "qwen2",
        ["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"],
    ),
    "bf16_tp2_sp_offloaded": (
        "qwen2",
        [
            "parallel.tp=2",
            "parallel.sequence_parallel=true",
            "model.dtype=bfloat16",
            *OFFLOADS,
        ],
    ),
    "pp2_vp2": ("qwen2", ["parallel.pp=2", "parallel.vpp=2"]),
    "moe_ep2": ("qwen3_moe", ["parallel.ep=2"]),
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    return {
        family: make_run(tmp_path_factory.mktemp(family), family=family)
        for family in ("qwen2", "qwen3_moe")
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_nan_on_one_rank_changes_nothing_anywhere_and_a_snapshot_changes_everything_back(
    configs, tmp_path, name
):
    family, overrides = LAYOUTS[name]
    out = ["--config", str(configs[family]), "--out", str(tmp_path)]
    run_ranks("guard.py", 2, *out, *overrides)
    details = set()
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        skipped = found["skipped"]
        assert (skipped["num_skipped"], skipped["scheduler_steps"]) == (1, 0)
        assert skipped["metrics"] == []
        assert skipped["action"] == "skip_update"
        assert "actor/grad_norm was nan" in skipped["reason"]
        assert found["allowed_again"]
        assert found["filled"] == [0, 2]  # trained on one rank alone, and on all
        details.add(skipped["detail"])
        for when in ("first", "second"):
            expected, *others = found[when]
            assert min(expected["norms"]) > 0
            for other in others:
                assert other["norms"] == expected["norms"], when
                assert other["lr"] == expected["lr"], when
                for weight, value in expected["weights"].items():
                    assert torch.equal(other["weights"][weight], value), (when, weight)
        weights = [found[when][0]["weights"] for when in ("first", "second")]
        assert any(not torch.equal(weights[0][w], weights[1][w]) for w in weights[0])
    (detail,) = details
    assert detail.startswith("The first that is not finite is ")
