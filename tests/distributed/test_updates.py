"""From scores to updates over DP: advantages, controller, ratio, collectives, bf16.

What the updates compute in every other layout is in test_layouts.py.
"""

from pathlib import Path

import pytest
import torch

from tests.distributed.launch import run_ranks
from tests.tiny_run import make_run

pytestmark = pytest.mark.distributed

LAYOUTS = {
    "dp2": (2, []),
    "cp2": (2, ["parallel.cp=2"]),
    "pp2_dp2": (4, ["parallel.pp=2"]),
}
SHAPE = [
    "actor.micro_batch_size=2",
    "critic.micro_batch_size=2",
    "actor.entropy_coeff=0.01",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl=adaptive",
    "algorithm.lam=0.9",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("update")
    make_run(folder)
    return folder


def update(root: Path, name: str, num_ranks: int, overrides: list[str]) -> list[dict]:
    out = root / name
    out.mkdir()
    run_ranks(
        "update.py", num_ranks,
        "--config", str(root / "run.yaml"), "--out", str(out), *SHAPE, *overrides,
    )  # fmt: skip
    return [torch.load(out / f"rank{r}.pt", weights_only=True) for r in range(num_ranks)]


@pytest.fixture(scope="module")
def alone(root):
    return update(root, "alone", 1, [])[0]


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request, root):
    num_ranks, overrides = LAYOUTS[request.param]
    return request.param, update(root, request.param, num_ranks, overrides)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12)).item()


def test_losses_and_gradient_norms_do_not_depend_on_the_layout(alone, layout):
    _, ranks = layout
    for rank in ranks:
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        assert set(rank["metrics"]) == set(alone["metrics"])
        for name, value in alone["metrics"].items():
            if name.startswith("perf/"):
                continue
            assert rank["metrics"][name] == pytest.approx(value, rel=2e-5, abs=1e-6), name


def test_weights_after_the_updates_do_not_depend_on_the_layout(alone, layout):
    _, ranks = layout
    for rank in ranks:
        assert rank["weights"].keys() == alone["weights"].keys()
        for name, expected in alone["weights"].items():
            assert difference(rank["weights"][name], expected) < 1e-5, name


def test_every_rank_holds_the_same_weights_bit_for_bit(layout):
    _, ranks = layout
    for rank in ranks[1:]:
        for name, expected in ranks[0]["weights"].items():
            assert torch.equal(rank["weights"][name], expected), name


def test_each_dp_rank_keeps_its_share_of_the_optimizer_state(layout):
    name, ranks = layout
    dp = 1 if name == "one" else 2  # context-parallel ranks share the state too
    for rank in ranks:
        # Two moments and, for float32 models, no further copy; buffers are padded a little.
        assert rank["optimizer_elements"] == pytest.approx(2 * rank["parameters"] / dp, rel=0.05)


def test_advantages_and_the_kl_coefficient_do_not_depend_on_the_layout(alone, layout):
    """KL in the reward, GAE, whitening over all ranks, the adaptive controller."""
    _, ranks = layout
    assert alone["kl_coef"] != 0.05
    expected = {
        row: alone["advantages"][i : i + 2] for i, row in enumerate(alone["rows"]) if not i % 2
    }
    assert alone["advantages"].abs().max() > 0.5
    for rank in ranks:
        assert rank["kl_coef"] == pytest.approx(alone["kl_coef"], rel=1e-6)
        for i, row in enumerate(rank["rows"]):
            if i % 2 == 0:
                found = rank["advantages"][i : i + 2]
                assert torch.allclose(found, expected[row], atol=2e-5), row


def test_updates_did_change_the_weights_and_the_policy(alone):
    assert max(alone["norms"]) > 0.01
    changed = (alone["new"] - alone["old"]).abs().max()
    assert changed > 1e-3


def test_before_the_first_step_the_ratio_is_exactly_one(alone, layout):
    _, ranks = layout
    for rank in [alone, *ranks]:
        assert rank["metrics"]["actor/first_ratio_diff_max"] == 0.0


GAP = ["actor.optim.lr=0", "actor.entropy_coeff=0", "actor.use_kl_loss=true"]
"""No step is taken, so that the trainer's ratio is 1 in both mini-batches."""


@pytest.fixture(scope="module")
def against_engine(root):
    return update(root, "bypass", 1, [*GAP, "actor.use_rollout_log_probs=true"])[0]


def test_corrections_weigh_and_reject_alike_under_context_parallelism(root, against_engine):
    """The loss is the plain policy gradient's, weighed by hand over the tokens that were kept."""
    correct = [
        "algorithm.rollout_is=sequence", "algorithm.rollout_is_threshold=1.2",
        "algorithm.rollout_rs=token", "algorithm.rollout_rs_threshold=1.3",
    ]  # fmt: skip
    alone = update(root, "corrected", 1, [*GAP, *correct])[0]
    ranks = update(root, "corrected_cp2", 2, [*GAP, *correct, "parallel.cp=2"])
    kept, sampled = alone["mask"], against_engine["mask"]
    assert 0 < kept.sum() < sampled.sum()
    d = torch.where(sampled, alone["old"] - alone["rollout"], 0.0)
    weights = d.sum(dim=-1, keepdim=True).exp().clamp(max=1.2)
    assert (weights == 1.2).any()
    expected = -(weights * alone["advantages"])[kept].sum() / kept.sum()
    for found in (alone, *ranks):
        assert found["metrics"]["actor/pg_loss"] == pytest.approx(expected.item(), abs=1e-6)
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        assert found["metrics"]["actor/first_ratio_diff_max"] == 0.0
    unweighed = -alone["advantages"][kept].sum() / kept.sum()
    assert abs(expected - unweighed) > 1e-3


def test_the_ratio_can_be_against_the_engines_log_probs(against_engine):
    """The KL from engine to trainer is then their gap, while the trainer's own ratio stays 1."""
    found = against_engine
    gap = (found["rollout"] - found["old"])[found["mask"]]
    assert gap.abs().max() > 0.2
    assert found["metrics"]["actor/ppo_kl"] == pytest.approx(gap.mean().item(), abs=1e-6)
    assert found["metrics"]["actor/pg_clipfrac"] > 0
    assert found["metrics"]["actor/first_ratio_diff_max"] == 0.0


def test_gradients_are_reduce_scattered_and_parameters_all_gathered_once_an_update(root):
    """Two models, two updates each: four of either collective, of the whole parameter buffer."""
    (rank, other) = update(root, "counted", 2, [])
    # float32; actor and critic have the same layers, and Megatron pads buffers a little.
    parameters = sum(w.numel() for w in rank["weights"].values())
    for found in (rank["collectives"], other["collectives"]):
        assert found["dist_reduce_scatter_func"] == 4
        assert found["dist_all_gather_func"] == 4
        sent = found["dist_reduce_scatter_func_bytes"]
        assert sent == pytest.approx(2 * 4 * parameters, rel=0.02)
        # Each rank sends the half of the parameters that it updated.
        assert found["dist_all_gather_func_bytes"] * 2 == pytest.approx(sent, rel=1e-9)


def test_bf16_keeps_float32_main_parameters_and_stays_equal_over_dp(root):
    """Weights are bf16, what the optimizer adds up is float32: three states an element."""
    ranks = update(root, "bf16", 2, ["model.dtype=bfloat16"])
    for rank in ranks:
        assert all(w.dtype == torch.bfloat16 for w in rank["weights"].values())
        assert max(rank["norms"]) > 0.01
        assert rank["metrics"]["actor/first_ratio_diff_max"] == 0.0
        for name, expected in ranks[0]["weights"].items():
            assert torch.equal(rank["weights"][name], expected), name


def test_weight_decay_shrinks_matrices_and_spares_norms_and_biases(root):
    """Megatron decays everything unless its scheduler sets each group's multiplier."""
    out = root / "decay.pt"
    run_ranks("decay.py", 1, str(root / "run.yaml"), str(out))
    found = torch.load(out, weights_only=True)
    assert found["norm"] == 0.0
    shrunk = 1 - found["lr"] * 0.5
    assert shrunk < 1
    kinds = {True: 0, False: 0}
    for name, before in found["before"].items():
        spared = "norm" in name or name.endswith("bias")
        kinds[spared] += 1
        expected = before if spared else before * shrunk
        assert torch.allclose(found["after"][name], expected, rtol=1e-6, atol=0), name
    assert min(kinds.values()) > 5
