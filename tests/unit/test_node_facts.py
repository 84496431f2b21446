"""Nodes that are not alike: which one is named, and with what."""

from importlib import metadata

import pytest
import torch

from megappo.distributed.node_facts import (
    NodeFacts,
    find_problem,
    gather_facts,
    settings_digest,
    spell_nccl,
)


def node(number, problem="", **settings):
    return NodeFacts(
        node=number, host=f"h{number}", address=f"10.0.0.{number}", problem=problem,
        settings={"a.lr": "1e-3", "torch": "2.13.0", **settings},
    )  # fmt: skip


def test_nodes_that_are_alike_have_no_problem():
    assert find_problem([node(0), node(1), node(2)]) == ""


def test_the_odd_one_is_named_with_both_values():
    found = find_problem([node(0), node(1, **{"a.lr": "1e-4"}), node(2)])
    assert "  a.lr: node 1 (h1, 10.0.0.1) has 1e-4; the other 2 nodes have 1e-3" in found
    assert "torch:" not in found


def test_the_majority_is_right_even_if_node_0_is_the_odd_one():
    found = find_problem([node(0, torch="2.8"), node(1), node(2)])
    assert "  torch: node 0 (h0, 10.0.0.0) has 2.8; the other 2 nodes have 2.13.0" in found


def test_of_two_nodes_the_second_is_the_odd_one():
    found = find_problem([node(0), node(1, torch="2.8")])
    assert "  torch: node 1 (h1, 10.0.0.1) has 2.8; node 0 (h0, 10.0.0.0) has 2.13.0" in found


def test_a_setting_that_one_node_lacks_is_a_difference():
    found = find_problem([node(0, new="1"), node(1)])
    assert "  new: node 1 (h1, 10.0.0.1) has (nothing); node 0 (h0, 10.0.0.0) has 1" in found


def test_long_lists_are_cut():
    many = {f"k{i:02}": "x" for i in range(20)}
    found = find_problem([node(0), node(1, **many)])
    assert "... and 8 more" in found
    assert "k11" in found
    assert "k12" not in found
    twenty = find_problem([node(0, a="1"), *[node(i, a="2") for i in range(1, 21)]])
    assert "a: node 0 (h0, 10.0.0.0) has 1; the other 20 nodes have 2" in twenty
    odd = find_problem([node(i, a=str(i < 10)) for i in range(21)])
    assert "node 7 (h7, 10.0.0.7) and 2 more have True" in odd


def test_a_node_that_cannot_take_part_says_why():
    found = find_problem([node(0), node(1, problem="no such file: x.yaml", torch="2.8")])
    assert found == "node 1 (h1, 10.0.0.1): no such file: x.yaml"


def test_facts_of_this_machine_survive_the_way_and_name_every_package():
    facts = gather_facts(
        {"a.b": 1, "c": [2]}, node=3, address="10.0.0.3", num_nodes=4, local_world_size=8
    )
    again = NodeFacts.from_json(facts.to_json())
    assert again == facts
    assert settings_digest(again) == settings_digest(facts)
    assert facts.settings["a.b"] == "1"
    assert facts.settings["ranks a node"] == "8"
    always = ("torch", "megatron-core", "sglang", "transformers", "megappo", "CUDA of torch")
    assert "not installed" not in " ".join(facts.settings[name] for name in always)
    assert facts.settings["CUDA of torch"] == (torch.version.cuda or "none: a CPU build")


def test_kernels_that_one_node_lacks_are_a_difference(monkeypatch):
    """With them the same layer computes other numbers, or a collective waits."""
    kernels = (
        "transformer-engine", "apex", "sglang-kernel", "sgl-kernel", "flashinfer-python",
        "flash-attn", "nvidia-nccl-cu13",
    )  # fmt: skip

    def facts(number, installed):
        def version(name):
            if name in installed:
                return "2.11.0"
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, "version", version)
        return gather_facts({}, node=number, address="a", num_nodes=2, local_world_size=1)

    for name in kernels:
        found = find_problem([facts(0, [name]), facts(1, [])])
        assert "has 2.11.0" in found or f"has {name} 2.11.0" in found, found
        assert "node 1" in found
        assert "has not installed" in found


def test_nccls_number_is_spelt_as_its_version():
    assert spell_nccl(22907) == "2.29.7"
    assert spell_nccl(21805) == "2.18.5"


@pytest.mark.parametrize("text", ["", "GET / HTTP/1.1", "{}", '{"node": 1}', "[1]"])
def test_other_text_is_no_facts(text):
    with pytest.raises(ValueError, match="not the facts of a node"):
        NodeFacts.from_json(text)
