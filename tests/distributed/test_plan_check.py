"""Memory that `megappo plan` predicts, against that of real ranks: within 10 %.

All layouts stand in docs/planner.md, by `tools/plan_check.py`; here are some of two ranks, in one
start.
"""

import pytest

from tools import plan_check

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1500)]
NAMES = ("dp2", "dp2_bf16", "tp2_sp", "tp2_sp_recompute", "pp2", "moe_ep2")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return plan_check.run(NAMES, tmp_path_factory.mktemp("plan"))


@pytest.mark.parametrize("name", NAMES)
def test_weights_gradients_optimizer_and_activations_are_predicted(rows, name):
    mine = [row for row in rows if row.name == name]
    assert [row.role for row in mine] == ["actor", "critic", "reference"]
    for row in mine:
        parts = plan_check.PARTS if row.role != "reference" else ("weights",)
        assert set(row.errors) == set(parts)
        for part in parts:
            assert row.measured[part] > 0
            assert abs(row.errors[part]) <= plan_check.BOUND, (row.role, part, row.errors[part])


def test_layouts_differ_by_more_than_the_bound(rows):
    """So a prediction that ignored the layout would not be within it."""
    by_name = {row.name: row.measured for row in rows if row.role == "actor"}
    assert by_name["tp2_sp_recompute"]["activations"] < 0.3 * by_name["tp2_sp"]["activations"]
    assert by_name["tp2_sp"]["activations"] < 0.6 * by_name["dp2"]["activations"]
    assert by_name["tp2_sp"]["weights"] < 0.6 * by_name["dp2"]["weights"]
    assert by_name["dp2_bf16"]["weights"] == 0.5 * by_name["dp2"]["weights"]
    assert by_name["dp2_bf16"]["optimizer"] == 1.5 * by_name["dp2"]["optimizer"]
