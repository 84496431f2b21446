"""Vocabulary-parallel log-probs and entropies, with gradients, against a full float64 softmax."""

from __future__ import annotations

import math

import pytest
import torch

from megappo.distributed.vocab_parallel import log_probs_and_entropy
from tests.distributed.launch import run_ranks

VOCAB, PADDED = 37, 40


def make_case(*, temperature: float = 1.0) -> dict:
    """Logits of 3 x 4 tokens whose padded columns are huge, so that any use of them shows."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(3, 4, PADDED, generator=generator)
    logits[..., VOCAB:] = 1e4
    return {
        "logits": logits,
        "targets": torch.randint(0, VOCAB, (3, 4), generator=generator),
        "weights": torch.randn(3, 4, generator=generator),
        "vocab_size": VOCAB,
        "temperature": temperature,
    }


def oracle(case: dict) -> dict[str, torch.Tensor]:
    """Plain log_softmax over the real columns in float64."""
    logits = case["logits"].double().requires_grad_()
    log_p = (logits[..., : case["vocab_size"]] / case["temperature"]).log_softmax(-1)
    log_probs = log_p.gather(-1, case["targets"][..., None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (log_probs * case["weights"] + entropy * case["weights"].flip(0)).sum().backward()
    return {"log_probs": log_probs.detach(), "entropy": entropy.detach(), "grad": logits.grad}


def run(case: dict, **settings):
    logits = case["logits"].clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(
        logits,
        case["targets"],
        tp_group=None,
        vocab_size=case["vocab_size"],
        temperature=case["temperature"],
        **settings,
    )
    loss = (log_probs * case["weights"]).sum()
    if entropy is not None:
        loss = loss + (entropy * case["weights"].flip(0)).sum()
    loss.backward()
    return log_probs.detach(), entropy, logits.grad


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual.double() - expected).abs().max() < 5e-6


def test_half_temperature_sharpens():
    # Logits 2, 0: -ln(1 + e^-4) at temperature 0.5, -ln(1 + e^-2) at 1.
    for temperature, expected in ((0.5, -0.018150), (1.0, -0.126928)):
        log_probs, entropy = log_probs_and_entropy(
            torch.tensor([[2.0, 0.0]]),
            torch.tensor([0]),
            tp_group=None,
            vocab_size=2,
            temperature=temperature,
        )
        assert log_probs.item() == pytest.approx(expected, abs=5e-7)
        assert entropy is None


@pytest.mark.parametrize("vocab_size", [2, 3])
def test_impossible_and_padded_tokens_add_nothing_to_entropy(vocab_size):
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(
        logits, torch.tensor([1]), tp_group=None, vocab_size=vocab_size, with_entropy=True
    )
    assert entropy.item() == pytest.approx(math.log(2), abs=1e-6)
    assert log_probs.item() == pytest.approx(-math.log(2), abs=1e-6)
    (log_probs + entropy).sum().backward()
    assert logits.grad.tolist() == [[pytest.approx(-0.5), pytest.approx(0.5), 0.0]]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 1024])
def test_one_rank_equals_full_softmax(temperature, chunk_tokens):
    case = make_case(temperature=temperature)
    expected = oracle(case)
    log_probs, entropy, grad = run(case, chunk_tokens=chunk_tokens, with_entropy=True)
    assert_close(log_probs, expected["log_probs"])
    assert_close(entropy.detach(), expected["entropy"])
    assert_close(grad, expected["grad"])
    assert not grad[..., VOCAB:].any()


@pytest.mark.distributed
@pytest.mark.parametrize(("num_ranks", "temperature"), [(2, 1.0), (4, 0.7)])
def test_split_vocabulary_equals_full_softmax(num_ranks, temperature, tmp_path):
    case = make_case(temperature=temperature)
    torch.save(case, tmp_path / "case.pt")
    expected = oracle(case)
    run_ranks("vocab_parallel.py", num_ranks, str(tmp_path))
    results = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(num_ranks)]
    for result in results:
        assert_close(result["log_probs"], expected["log_probs"])
        assert_close(result["entropy"], expected["entropy"])
    assert_close(torch.cat([r["grad"] for r in results], -1), expected["grad"])


@pytest.mark.distributed
def test_a_rank_that_holds_padding_only_takes_part(tmp_path):
    case = make_case() | {"vocab_size": 19}
    case["targets"] = case["targets"] % 19
    torch.save(case, tmp_path / "case.pt")
    expected = oracle(case)
    run_ranks("vocab_parallel.py", 2, str(tmp_path))
    results = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert_close(results[1]["log_probs"], expected["log_probs"])
    assert_close(torch.cat([r["grad"] for r in results], -1), expected["grad"])


def test_log_probs_alone_have_the_same_value_and_gradient():
    case = make_case()
    log_probs, entropy, grad = run(case)
    logits = case["logits"][..., :VOCAB].double().requires_grad_()
    expected = logits.log_softmax(-1).gather(-1, case["targets"][..., None])[..., 0]
    (expected * case["weights"]).sum().backward()
    assert entropy is None
    assert_close(log_probs, expected.detach())
    assert_close(grad[..., :VOCAB], logits.grad)


def test_bfloat16_logits_give_float32_results_of_the_rounded_logits():
    case = make_case()
    case["logits"] = case["logits"].bfloat16()
    expected = oracle(case)
    log_probs, entropy, grad = run(case, with_entropy=True)
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert_close(log_probs, expected["log_probs"])
    assert grad.dtype == torch.bfloat16
    assert (grad.double() - expected["grad"]).abs().max() < 2**-8 * expected["grad"].abs().max()


def test_a_target_outside_the_vocabulary_is_nan_and_not_a_plausible_number():
    log_probs, _ = log_probs_and_entropy(
        torch.zeros(3, 4), torch.tensor([0, 3, -1]), tp_group=None, vocab_size=3
    )
    assert log_probs.isnan().tolist() == [False, True, True]


def test_gradient_takes_the_memory_of_the_logits():
    leaf = torch.randn(6, 8, requires_grad=True)
    logits = leaf * 1.0
    log_probs, _ = log_probs_and_entropy(
        logits, torch.zeros(6, dtype=torch.long), tp_group=None, vocab_size=8
    )
    before = logits.detach().clone()
    log_probs.sum().backward()
    assert torch.equal(logits.detach(), leaf.grad)
    assert not torch.equal(logits.detach(), before)


def test_logits_of_the_caller_are_not_overwritten():
    leaf = torch.randn(2, 3, 8, requires_grad=True)
    before = leaf.detach().clone()
    log_probs, _ = log_probs_and_entropy(
        leaf[1], torch.zeros(3, dtype=torch.long), tp_group=None, vocab_size=8
    )
    log_probs.sum().backward()
    assert torch.equal(leaf.detach(), before)


def test_another_use_of_overwritten_logits_is_an_error():
    leaf = torch.randn(4, 8, requires_grad=True)
    logits = leaf * 1.0
    log_probs, _ = log_probs_and_entropy(
        logits, torch.zeros(4, dtype=torch.long), tp_group=None, vocab_size=8
    )
    log_probs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.sum().backward()


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e30, 0.0, 1e30]], requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(
        logits, torch.tensor([0, 2]), tp_group=None, vocab_size=3, with_entropy=True
    )
    (log_probs + entropy).sum().backward()
    assert log_probs.tolist() == entropy.tolist() == [0.0, 0.0]
    assert logits.grad.isfinite().all()
