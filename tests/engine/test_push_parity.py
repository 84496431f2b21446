"""Pushes from real training layouts, with transformers as the oracle: part of the tool's table."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("push_parity", ROOT / "tools" / "push_parity.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["push_parity"] = module
    spec.loader.exec_module(module)
    return module


tool = load_tool()
CASES = [
    tool.Case(model=model, rollout_tp=tp, layout=layout)
    for model, tp, layouts in (
        ("llama_one_kv_head", 2, ["tp1", "pp2"]),
        ("qwen2", 2, ["tp2"]),
        ("qwen2_tied", 2, ["tp2_dp2"]),
        ("qwen3", 1, ["pp2"]),
        ("mistral", 1, ["tp2"]),
        ("qwen3_moe", 2, ["ep2", "tp2_sp"]),
    )
    for layout in layouts
]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[Any, Any]:
    found = tool.run(CASES, tmp_path_factory.mktemp("push"), timeout_s=1700)
    return {result.case: result for result in found}


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.model} {c.layout} to TP {c.rollout_tp}")
def test_engines_answer_with_the_weights_that_were_pushed(results, case):
    result = results[case]
    assert result.tokens, "a greedy token is not the likeliest"
    assert result.before <= 1e-4
    assert result.after <= 1e-4
    assert result.trainer <= 1e-4
    assert result.moved > 0.01, "the optimizer step changed too little to be seen"
    assert result.buckets, "answers depend on the size of the buckets"
    assert result.num_verified > 10


def test_the_cases_have_every_family_and_every_layout():
    assert {tool.MODELS[case.model]["model_type"] for case in CASES} == {
        model["model_type"] for model in tool.MODELS.values()
    }
    assert {case.layout for case in CASES} >= {"tp1", "tp2", "pp2", "tp2_dp2", "ep2"}
    assert {case.rollout_tp for case in CASES} == {1, 2}
    assert set(CASES) <= set(tool.all_cases())
