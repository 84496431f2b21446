"""A checkpoint of one layout goes on in another: the same next step, within float32's reach.

Each layout saves, and those after it load what is there, so every way between two is taken once;
the first one again at the end, for the other direction.
"""

import json

import pytest
import torch

from tests.distributed.launch import run_ranks
from tests.tiny_run import make_run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1500)]

TP2 = ["parallel.tp=2", "parallel.sequence_parallel=true"]
DENSE = {
    "tp2": TP2,
    "dp2": [],
    "vpp2": ["parallel.pp=2", "parallel.vpp=2"],
    "pp2": ["parallel.pp=2", "parallel.pipeline_layers=[3,1]"],
}
EXPERTS = {
    "ep2": ["parallel.ep=2"],
    "tp2_etp1": [*TP2, "parallel.ep=2", "parallel.etp=1"],
    "pp2": ["parallel.pp=2"],
}
LORA = ["actor.lora.rank=4", "critic.lora.rank=4"]
ADAPTERS = {
    "tp2": [*TP2, *LORA],
    "dp2": LORA,
    "vpp2": ["parallel.pp=2", "parallel.vpp=2", *LORA],
}
MODELS = {
    # Tied, so that a stage has a bucket with padding behind it; an odd vocabulary, padded under TP.
    "qwen2": (DENSE, {"family": "qwen2"}),
    # The checkpoint has the adapters alone, with rows of gate and up that TP cuts apart.
    "adapters": (ADAPTERS, {"family": "qwen2"}),
    # Without experts on the first of two stages, whose expert optimizer is empty.
    "qwen3_moe": (EXPERTS, {"family": "qwen3_moe", "mlp_only_layers": [0, 1]}),
}


@pytest.fixture(scope="module", params=MODELS)
def checkpoints(request, tmp_path_factory):
    layouts, model = MODELS[request.param]
    root = tmp_path_factory.mktemp(request.param)
    config = make_run(root, **model)
    out = root / "out"
    out.mkdir()
    order = [*layouts.items(), next(iter(layouts.items()))]
    arguments = ["--config", str(config), "--out", str(out)]
    run_ranks("reshard.py", 2, *arguments, json.dumps(order), timeout_s=400)
    if request.param == "qwen2":  # and a world of another size
        run_ranks("reshard.py", 1, *arguments, json.dumps([["one_rank", []]]), timeout_s=200)
    return out, list(layouts)


def test_the_next_step_is_that_of_the_layout_that_saved(checkpoints):
    out, layouts = checkpoints
    pairs = [path.stem.split("_to_") for path in sorted(out.glob("*_to_*.pt"))]
    assert {saved for saved, _ in pairs} == set(layouts)
    assert {[*layouts, "one_rank"].index(now) for _, now in pairs} >= set(range(len(layouts)))
    for saved, now in pairs:
        expected = torch.load(out / f"{saved}.pt", weights_only=True)
        found = torch.load(out / f"{saved}_to_{now}.pt", weights_only=True)
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-6, rel=1e-5)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert found["lr"] == expected["lr"]
        assert found["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            # The step moves weights by up to 1e-3; without its moments it would by as much more.
            assert (found["weights"][name] - weight).abs().max() < 1e-6, (saved, now, name)


def test_random_streams_are_defined_by_seed_and_step_in_another_layout(checkpoints):
    out, _ = checkpoints
    draws = [torch.load(path, weights_only=True)["draw"] for path in sorted(out.glob("*_to_*.pt"))]
    expected = torch.rand(3, generator=torch.Generator().manual_seed(7 + 1))
    assert all(torch.equal(draw, expected) for draw in draws)
