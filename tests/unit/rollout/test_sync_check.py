"""Which weights are compared, and what SGLang's processes hold of them, by hand."""

import pytest
import torch

from megappo.rollout.engine import EngineRefused
from megappo.rollout.sync_check import SyncWitness, _checksum, engine_name, engine_shard


def rows(count, columns=1, start=0):
    return torch.arange(start, start + count * columns, dtype=torch.float32).reshape(count, columns)


def shards(*parts, tp, kv=2):
    return [
        engine_shard(parts, rank=rank, tp_size=tp, num_kv_heads=kv).tolist() for rank in range(tp)
    ]


def test_names_of_fused_parameters():
    layer = "model.layers.3."
    assert engine_name(layer + "self_attn.k_proj.bias") == layer + "self_attn.qkv_proj.bias"
    assert engine_name(layer + "mlp.up_proj.weight") == layer + "mlp.gate_up_proj.weight"
    assert engine_name(layer + "mlp.gate.weight") == layer + "mlp.gate.weight"
    experts = layer + "mlp.experts"
    assert engine_name(experts + ".12.up_proj.weight") == experts + ".w13_weight"
    assert engine_name(experts + ".12.down_proj.weight") == experts + ".w2_weight"
    shared = layer + "mlp.shared_experts."
    assert engine_name(shared + "up_proj.weight") == shared + "gate_up_proj.weight"
    mixtral = layer + "block_sparse_moe.experts"
    assert engine_name(mixtral + ".3.w3.weight") == mixtral + ".w13_weight"
    assert engine_name(mixtral + ".3.w2.weight") == mixtral + ".w2_weight"


def test_attention_rows_are_split_by_heads():
    q, k, v = (f"l.{x}_proj.weight" for x in "qkv")
    parts = ((q, rows(4)), (k, rows(2, start=10)), (v, rows(2, start=20)))
    assert shards(*parts, tp=2) == [
        [[0], [1], [10], [20]],
        [[2], [3], [11], [21]],
    ]


def test_a_key_value_head_is_repeated_where_there_are_more_processes():
    q, k, v = (f"l.{x}_proj.weight" for x in "qkv")
    parts = ((q, rows(4)), (k, rows(2, start=10)), (v, rows(2, start=20)))
    assert [[x[0] for x in shard] for shard in shards(*parts, tp=4)] == [
        [0, 10, 20],
        [1, 10, 20],
        [2, 11, 21],
        [3, 11, 21],
    ]


def test_output_projections_are_split_by_columns_and_norms_not_at_all():
    assert shards(("l.o_proj.weight", rows(1, 4)), tp=2) == [[[0, 1]], [[2, 3]]]
    assert shards(("l.norm.weight", rows(2)), tp=2) == [[[0], [1]], [[0], [1]]]


def test_experts_stand_below_each_other():
    e = "l.experts."
    gate_up = [(f"{e}{i}.{x}_proj.weight", rows(2, start=10 * i + 4 * (x == "up")))
               for i in (0, 1) for x in ("gate", "up")]  # fmt: skip
    first, second = shards(*gate_up, tp=2)
    assert [x[0] for x in first] == [0, 4, 10, 14]
    assert [x[0] for x in second] == [1, 5, 11, 15]
    named = [(name.replace("gate_proj", "w1").replace("up_proj", "w3"), x) for name, x in gate_up]
    assert shards(*named, tp=2) == [first, second]
    down = [(f"{e}{i}.down_proj.weight", rows(1, 2, start=10 * i)) for i in (0, 1)]
    assert shards(*down, tp=2) == [[[0], [10]], [[1], [11]]]


def test_an_mlps_width_is_split_as_it_is():
    gate_up = (("l.gate_proj.weight", rows(6)), ("l.up_proj.weight", rows(6, start=10)))
    first, second = shards(*gate_up, tp=2)
    assert [x[0] for x in first] == [0, 1, 2, 10, 11, 12]
    assert [x[0] for x in second] == [3, 4, 5, 13, 14, 15]
    assert shards(("l.down_proj.weight", rows(1, 6)), tp=2) == [[[0, 1, 2]], [[3, 4, 5]]]


def test_words_are_padded_with_zeros():
    first, second = shards(("model.embed_tokens.weight", rows(70)), tp=2)
    assert (len(first), len(second)) == (64, 64)
    assert [x[0] for x in second] == [64, 65, 66, 67, 68, 69, *[0] * 58]
    assert [len(s) for s in shards(("lm_head.weight", rows(70)), tp=3)] == [64, 64, 64]


def test_one_layer_of_each_kind_and_everything_outside_are_compared():
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    names += [f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 1)]
    names += [f"model.layers.{i}.mlp.experts.{e}.down_proj.weight" for i in (2, 10) for e in (0, 1)]
    witness = SyncWitness(names)
    assert list(witness.watch((name, torch.ones(1)) for name in names))
    assert set(witness._copies) == {
        *names[:2],
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.10.mlp.experts.0.down_proj.weight",
        "model.layers.10.mlp.experts.1.down_proj.weight",
    }


def test_an_engine_may_hold_a_router_in_float32():
    name = "model.layers.0.mlp.gate.weight"
    sent = torch.tensor([[1.5, -0.3], [2.0, 7.0]], dtype=torch.bfloat16)
    witness = SyncWitness([name])
    list(witness.watch([(name, sent)]))
    for held in (sent, sent.float()):
        found = [{name: _checksum(held)}]
        assert witness.compare(found, num_kv_heads=2, device="cpu") == 1
    with pytest.raises(EngineRefused, match=name):
        witness.compare([{name: _checksum(sent.float() + 1e-6)}], num_kv_heads=2, device="cpu")
