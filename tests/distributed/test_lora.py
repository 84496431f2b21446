"""Adapters: what is trained, that it is the same in every layout, and what is written of it."""

import json

import pytest
import torch

from tests.distributed.launch import run_ranks
from tests.tiny_run import make_run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1500)]

RANK_64 = [
    "actor.lora.rank=64",
    "critic.lora.rank=64",
    "actor.micro_batch_size=2",
    "critic.micro_batch_size=2",
]
LAYOUTS = {
    "tp2_sp": ["parallel.tp=2", "parallel.sequence_parallel=true"],
    "tp2": ["parallel.tp=2", "actor.memory.recompute=full", "actor.memory.param_offload=true"],
    "pp2": ["parallel.pp=2", "critic.memory.recompute=full"],
    "cp2": ["parallel.cp=2"],
    "dp2": ["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"],
}
DROPPED = [*RANK_64, "actor.lora.dropout=0.5", "critic.lora.dropout=0.5"]
AGAIN = ["actor.memory.recompute=full", "critic.memory.recompute=full"]
"""Forward passes are computed again in the backward pass, and must drop the same."""
ALONE = {"alone": RANK_64, "dropped": DROPPED, "dropped_again": [*DROPPED, *AGAIN]}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    make_run(folder)
    return folder


@pytest.fixture(scope="module")
def found(root):
    """Layout -> what each rank wrote; the layouts of two ranks share two processes."""
    arguments = ["--config", str(root / "run.yaml"), "--out", str(root)]
    run_ranks("lora.py", 1, *arguments, json.dumps(ALONE))
    layouts = {name: [*RANK_64, *overrides] for name, overrides in LAYOUTS.items()}
    layouts["dropped_tp2"] = [*DROPPED, *AGAIN, "parallel.tp=2"]
    run_ranks("lora.py", 2, *arguments, json.dumps(layouts), timeout_s=400)
    return {
        name: [
            torch.load(file, weights_only=True) for file in sorted((root / name).glob("rank*.pt"))
        ]
        for name in (*ALONE, *layouts)
    }


@pytest.fixture(scope="module")
def alone(found):
    return found["alone"][0]


@pytest.fixture(params=LAYOUTS)
def ranks(request, found):
    assert len(found[request.param]) == 2
    return found[request.param]


def test_updates_do_not_depend_on_the_layout(alone, ranks):
    assert (alone["new"] - alone["old"]).abs().max() > 1e-3, "nothing was learned"
    for rank in ranks:
        assert rank["norms"] == pytest.approx(alone["norms"], rel=2e-5)
        assert rank["norms_again"] == rank["norms"][2:]  # after a return to a copy in memory
        for name, weight in alone["weights"].items():
            # Three steps of Adam at 1e-3 or less move B A by about 1e-2.
            assert (rank["weights"][name] - weight).abs().max() < 2e-6, name


def test_the_reference_is_the_model_without_adapters(alone):
    assert torch.equal(alone["reference"], alone["old"])


def test_only_adapters_and_the_value_head_are_trained(alone, ranks):
    for rank in (alone, *ranks):
        assert not rank["frozen_moved"]
        assert rank["trained"]
        assert all(".lora." in name for name in rank["trained"])
    adapters = alone["adapter_elements"]
    assert alone["optimizer_elements"]["actor"] == adapters["actor"]
    assert alone["optimizer_elements"]["critic"] == adapters["critic"] + 32  # the value head


def test_dropout_acts_in_updates_alone(found, alone):
    (dropped,) = found["dropped"]
    assert torch.equal(dropped["old"], alone["old"])
    assert dropped["norms"][:2] != pytest.approx(alone["norms"][:2], rel=1e-3)
    first, second = dropped["new"]
    assert (first - dropped["old"]).abs().max() > 1e-3, "nothing was learned"
    assert torch.equal(first, second)
    for name, weight in dropped["weights"].items():
        assert torch.equal(dropped["exported_while_dropping"][name], weight), name


def test_recomputation_drops_what_was_dropped(found):
    (dropped,), (again,) = found["dropped"], found["dropped_again"]
    assert again["norms"] == pytest.approx(dropped["norms"], rel=1e-6)
    for name, weight in dropped["weights"].items():
        assert (again["weights"][name] - weight).abs().max() < 1e-7, name


def test_tp_ranks_drop_alike_where_their_inputs_are_the_same_and_else_by_themselves(found):
    """The worker has compared the weights that both ranks hold after updates with dropout."""
    first, second = (rank["masks"] for rank in found["dropped_tp2"])
    assert len(first) == len(second) == 16
    for name, mask in first.items():
        assert set(mask.unique().tolist()) == {0.0, 2.0}
        has_all_inputs = name.endswith(("linear_qkv", "linear_fc1"))
        assert torch.equal(mask, second[name]) == has_all_inputs, name


def test_dp_ranks_share_the_optimizer(found, alone):
    total = sum(rank["optimizer_elements"]["actor"] for rank in found["dp2"])
    assert total == alone["adapter_elements"]["actor"]


def test_peft_reads_the_adapters(root, found):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
        before = base(tokens).logits
        for layout in ("alone", "tp2_sp", "pp2"):
            merged = AutoModelForCausalLM.from_pretrained(root / layout / "merged")(tokens).logits
            model = PeftModel.from_pretrained(base, root / layout / "peft")
            with_adapters = model(tokens).logits
            base = model.unload()
            assert (with_adapters - merged).abs().max() < 2e-5
            assert (with_adapters - before).abs().max() > 1e-2
    settings = json.loads((root / "alone" / "peft" / "adapter_config.json").read_text())
    assert settings["r"] == 64
    assert len(settings["target_modules"]) == 7
