"""Every parallel layout trains actor and critic as one rank does: the table of docs/parallelism.md.

`tools/parallel_table.py` runs all layouts once on real gloo ranks; the tests look at what came out.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "parallel_table", ROOT / "tools" / "parallel_table.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["parallel_table"] = module
    spec.loader.exec_module(module)
    return module


table = load_tool()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, list[Any]]:
    return table.run(list(table.LAYOUTS), tmp_path_factory.mktemp("table"))


@pytest.fixture(scope="module")
def comparisons(results) -> dict[str, Any]:
    return {row.name: row for row in table.compare(results)}


@pytest.mark.parametrize("name", table.LAYOUTS)
def test_losses_gradient_norms_and_parameters_are_those_of_one_rank(comparisons, name):
    row = comparisons[name]
    assert row.loss <= 1e-5
    assert row.norm <= 1e-5
    assert row.parameters <= 1e-5


@pytest.mark.parametrize("name", table.LAYOUTS)
def test_all_ranks_hold_the_same_weights_bit_for_bit(results, name):
    ranks = results[name]
    for rank in ranks:
        assert rank["tied"], "first and last stage differ in the tied embedding after some step"
        assert rank["copies"], "TP ranks differ in the gradient of a norm or a router"
        assert rank["weights"].keys() == ranks[0]["weights"].keys()
        for key, expected in ranks[0]["weights"].items():
            assert torch.equal(rank["weights"][key], expected), key


@pytest.mark.parametrize("name", table.LAYOUTS)
def test_log_probs_entropies_and_values_before_the_update_are_those_of_one_rank(results, name):
    """Packed, padded, split over CP: each sample's numbers, wherever it was computed."""
    alone = results[f"one rank: {table.LAYOUTS[name].models}"][0]
    place = {sample: b for b, sample in enumerate(alone["rows"])}
    for rank in results[name]:
        order = [place[sample] for sample in rank["rows"]]
        for field, expected in alone["before"].items():
            assert (rank["before"][field] - expected[order]).abs().max() < 2e-5, field
        # The reference has other weights than the actor, so nothing is compared with itself.
        assert (rank["before"]["ref"] - rank["before"]["old"]).abs().max() > 0.1


def test_the_runs_did_train_and_did_clip(results):
    for models in table.MODELS:
        (alone,) = results[f"one rank: {models}"]
        start = alone["losses"][: len(alone["losses"]) // table.STEPS]
        assert alone["losses"][-len(start) :] != start
        assert max(alone["norms"]) > 0.5, "the gradient is clipped at 0.5 in at least one step"


def test_the_experts_balance_loss_takes_part(results):
    """An even load adds 1 a layer, and no load less; layer 1 of the models has no experts."""
    (alone,) = results["one rank: moe"]
    steps = zip(*[iter(alone["losses"])] * len(alone["loss_names"]), strict=True)
    for step in steps:
        found = dict(zip(alone["loss_names"], step, strict=True))
        assert 3 * 0.9 < found["actor/moe_aux_loss"] < 3 * 4
        assert 4 * 0.9 < found["critic/moe_aux_loss"] < 4 * 8


@pytest.mark.parametrize("name", [n for n in table.LAYOUTS if "dynamic" in n])
def test_a_token_budget_is_never_passed_and_the_number_of_passes_is_agreed(results, name):
    ranks = results[name]
    for rank in ranks:
        # As DYNAMIC has them.
        assert rank["longest_pass"]["actor"] <= 70
        assert rank["longest_pass"]["critic"] <= 64
        assert rank["micro_batches"] == ranks[0]["micro_batches"]
        if rank["degrees"]["vp"] > 1:
            assert all(n % rank["degrees"]["pp"] == 0 for n in rank["micro_batches"])


def test_recomputation_keeps_fewer_activations(results):
    plain = results["one rank: dense"][0]["activations_gb"]
    recomputed = results["recompute"][0]["activations_gb"]
    assert all(0 < r < 0.5 * p for r, p in zip(recomputed, plain, strict=True))


def test_optimizer_state_falls_with_the_number_of_data_parallel_ranks(results):
    alone = results["one rank: dense"][0]["optimizer_bytes"]
    for name, share in (("dp2", 2), ("cp2_dp2", 4), ("dp4_dynamic", 4)):
        for rank in results[name]:
            assert rank["optimizer_bytes"] == pytest.approx(alone / share, rel=0.02), name


def test_no_layout_is_missing():
    titles = {layout.title for layout in table.LAYOUTS.values()}
    assert titles >= {
        "TP2", "TP2 + SP", "PP2", "PP2 x VPP2", "CP2", "EP2 (over DP2)", "DP2", "TP2 x DP2",
        "TP2 x PP2", "PP2 x DP2", "CP2 x DP2", "EP2 x DP2", "TP2 + SP x CP2",
        "one rank, micro-batches of 1", "one rank, micro-batches of 4", "one rank, padded",
        "one rank, token budget",
    }  # fmt: skip
