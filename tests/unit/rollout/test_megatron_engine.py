"""What the in-process engine does without a forward pass; generation is in tests/distributed."""

import pytest
import torch

from megappo.rollout.megatron_engine import MegatronEngine

WEIGHT = torch.ones(2)


@pytest.fixture
def engine() -> MegatronEngine:
    return MegatronEngine(
        chunk=None, vocab_size=4, memory=None, context=None, tokenizer=None,
        end_tokens=frozenset(), context_length=8, max_running_requests=2,
    )  # fmt: skip


def test_a_push_takes_the_version_and_copies_nothing(engine):
    assert engine.weight_version == 0
    report = engine.update_weights(
        iter([("a", WEIGHT), ("b", WEIGHT)]), expected_names={"a", "b"}, version=3
    )
    assert (report.num_tensors, report.num_bytes, engine.weight_version) == (2, 0, 3)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "b", "c"], "unknown: c"),
        (["a"], "missing: b"),
        (["a", "b", "a"], "twice: a"),
        (["x", "x"], "unknown: x; missing: a, b; twice: x"),
    ],
)
def test_a_push_with_wrong_names_keeps_the_version(engine, names, message):
    with pytest.raises(ValueError, match=message):
        engine.update_weights(
            [(name, WEIGHT) for name in names], expected_names={"a", "b"}, version=1
        )
    assert engine.weight_version == 0


def test_a_sleeping_engine_neither_generates_nor_takes_a_push(engine):
    engine.sleep()
    for call in (
        lambda: engine.generate([]),
        lambda: engine.update_weights([], expected_names=set(), version=1),
    ):
        with pytest.raises(RuntimeError, match=r"sleeps: call wake\(\)"):
            call()
    engine.wake()
    engine.update_weights([], expected_names=set(), version=1)
    assert engine.weight_version == 1


def test_an_engine_that_has_ended_does_not_wake(engine):
    with engine:
        pass
    engine.shutdown()
    engine.wake()
    with pytest.raises(RuntimeError, match="has ended"):
        engine.generate([])
