"""Estimators, policy losses, dynamic sampling in every layout, with siblings on several ranks."""

import pytest
import torch

from megappo.data.sampler import PromptSampler, rank_share
from megappo.ppo.advantages import group_advantages
from tests.distributed.launch import run_ranks
from tests.distributed.workers.dynamic_sampling import (
    BATCH,
    CASES,
    MINI,
    N,
    curriculum,
    failed_of,
    scores_of,
    source_of,
)
from tests.tiny_run import make_run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1500)]

LAYOUTS = {
    "alone": (1, []),
    "dp2": (2, []),
    "tp2": (2, ["parallel.tp=2", "parallel.sequence_parallel=true"]),
    "cp2": (2, ["parallel.cp=2"]),
}
SETTINGS = [
    "algorithm.adv_estimator=grpo", "algorithm.kl_ctrl=fixed", "actor.optim.lr=0",
    "actor.micro_batch_size=2", "actor.use_kl_loss=false",
    "actor.loss_agg_mode=seq-mean-token-mean",
    "actor.clip_ratio_low=0.1", "actor.clip_ratio_high=0.15", "data.train_batch_size=8",
    "actor.mini_batch_size=8", "rollout.n=2",
]  # fmt: skip
ESTIMATORS = {"gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax"}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    root = tmp_path_factory.mktemp("algorithms")
    make_run(root)
    made = {}
    for name, (ranks, overrides) in LAYOUTS.items():
        (out := root / name).mkdir()
        run_ranks("algorithms.py", ranks, str(root / "run.yaml"), str(out), *SETTINGS, *overrides)
        made[name] = [torch.load(out / f"rank{r}.pt", weights_only=True) for r in range(ranks)]
    return made


def others(found):
    return [(name, rank) for name, ranks in found.items() if name != "alone" for rank in ranks]


def test_advantages_are_those_of_one_rank_with_siblings_on_several(found):
    (alone,) = found["alone"]
    assert set(alone["advantages"]) == ESTIMATORS
    assert found["dp2"][0]["prompts"] == found["dp2"][1]["prompts"]  # every group is split
    for name, rank in others(found):
        for kind, expected in alone["advantages"].items():
            assert expected.abs().max() > 0.1
            got = rank["advantages"][kind]
            assert torch.allclose(got, expected[rank["rows"]], atol=2e-6), (name, kind)


def test_a_masked_sibling_leaves_the_other_alone_in_its_group(found):
    """Sample 3 has no trained token, so 2 is a group of one, and 0 for whoever compares."""
    (alone,) = found["alone"]
    assert not alone["samples"]["mask"][3].any()
    for kind in ("grpo", "dr_grpo", "rloo"):
        assert not alone["advantages"][kind][2:4].any()
        assert alone["advantages"][kind][:2].any()


def test_an_estimators_kl_is_part_of_what_siblings_are_compared_by(found):
    (alone,) = found["alone"]
    scores, mask = alone["samples"]["scores"], alone["samples"]["mask"]
    ids, counted = torch.tensor(alone["prompts"]), mask.any(dim=-1)
    without_kl = group_advantages(scores, ids, kind="rloo", counted=counted)
    got = alone["advantages"]["rloo"][:, 0]
    assert 1e-3 < (got - without_kl)[mask[:, 0]].abs().max() < 0.5


def test_losses_and_gradient_norms_of_every_policy_loss_do_not_depend_on_the_layout(found):
    (alone,) = found["alone"]
    assert set(alone["losses"]) == {"ppo", "gspo", "cispo", "sapo"}
    for name, rank in others(found):
        for loss, expected in alone["losses"].items():
            for metric, value in expected.items():
                got = rank["losses"][loss][metric]
                assert got == pytest.approx(value, rel=2e-5, abs=1e-6), (name, loss, metric)


def test_gspo_clips_whole_responses(found):
    """Against the ratio of each response by hand: all of its tokens are clipped, or none."""
    (alone,) = found["alone"]
    s, mask = alone["samples"], alone["samples"]["mask"]
    log_ratio = torch.where(mask, s["now"] - s["old"], 0.0).sum(dim=-1)
    ratio = (log_ratio / mask.sum(dim=-1).clamp(min=1)).exp()
    a = alone["advantages"]["grpo"].sum(dim=-1).sign()
    clipped = ((a > 0) & (ratio > 1.15)) | ((a < 0) & (ratio < 0.9))
    expected = (clipped[:, None] & mask).sum() / mask.sum()
    assert 0 < expected < 1
    assert alone["losses"]["gspo"]["actor/pg_clipfrac"] == pytest.approx(expected.item(), abs=1e-6)


def test_the_policy_losses_are_different_ones(found):
    norms = [loss["norm"] for loss in found["alone"][0]["losses"].values()]
    assert min(norms) > 1e-3
    assert len({round(norm, 6) for norm in norms}) == len(norms)


def expected_groups(case):
    """(row, round) of a step's groups in order, by a loop over rounds as one would write it."""
    num_rows, max_rounds = CASES[case]
    sampler = PromptSampler(num_rows, batch_size=BATCH, seed=3, shuffle=True)
    kept, spare, rounds = {}, {}, 0
    while rounds < max_rounds and len(kept) < BATCH:
        for row in sampler.next_batch()[1]:
            scores = zip(scores_of(row, rounds, num_rows), failed_of(row, num_rows), strict=True)
            differs = len({score for score, failed in scores if not failed}) > 1
            if differs and row not in kept:
                kept[row] = rounds
            elif row not in spare:
                spare[row] = rounds
        rounds += 1
    filling = [(row, at) for row, at in spare.items() if row not in kept]
    return ([*kept.items(), *filling])[:BATCH], len(kept), rounds, sampler.state_dict()


@pytest.mark.parametrize("case", CASES)
def test_dynamic_sampling_takes_groups_of_different_scores_in_the_order_drawn(found, case):
    groups, num_kept, rounds, sampler = expected_groups(case)
    for name, ranks in found.items():
        for rank in ranks:
            got = rank["dynamic"][case]
            dp, dp_rank = (2, ranks.index(rank)) if name == "dp2" else (1, 0)
            mine = rank_share(groups, mini_batch_size=MINI, dp_rank=dp_rank, dp_size=dp)
            assert got["texts"] == [f"{row} {at} {k}" for row, at in mine for k in range(N)]
            assert got["sources"] == [f"source {row}" for row, _ in mine for _ in range(N)]
            num_rows = CASES[case][0]
            failed = [f for row, _ in mine for f in failed_of(row, num_rows)]
            assert got["failed"] == failed
            assert got["trained"] == [not f for f in failed]
            assert got["scores"] == [s for row, at in mine for s in scores_of(row, at, num_rows)]
            assert [len(r) for r in got["responses"]] == [
                1 + (row + k) % 3 for row, _ in mine for k in range(N)
            ]
            assert got["metrics"]["sampling/rounds"] == rounds
            filled = (BATCH - min(num_kept, BATCH)) / BATCH
            assert got["metrics"]["sampling/filled_share"] == pytest.approx(filled)
            assert got["sampler"] == sampler


def test_dynamic_sampling_is_bounded_and_says_how_much_it_kept(found):
    metrics = {case: found["alone"][0]["dynamic"][case]["metrics"] for case in CASES}
    assert metrics["enough"]["sampling/rounds"] == 3
    assert metrics["enough"]["sampling/kept_share"] == pytest.approx(8 / 24)
    assert metrics["enough"]["sampling/filled_share"] == 0
    assert metrics["bounded"]["sampling/rounds"] == 1
    assert metrics["bounded"]["sampling/filled_share"] > 0.5
    assert metrics["failing"]["sampling/kept_share"] < 1 / 3  # the ninth that failed is not kept
    assert 1 < metrics["again"]["sampling/rounds"] <= 4


def test_a_curriculum_learns_the_same_scores_and_draws_the_same_prompts_in_every_layout(found):
    sampler, batches = curriculum(), []
    for _ in range(6):
        rows = sampler.next_batch()[1]
        batches.append(rows)
        pairs = [torch.tensor([row / 24, (row + 1) / 24]) for row in rows]
        sampler.observe(rows, [pair.double().mean().item() for pair in pairs])
    assert sorted(row for rows in batches[:3] for row in rows) == list(range(24))
    for name, ranks in found.items():
        for rank in ranks:
            got = rank["curriculum"]
            dp, dp_rank = (2, ranks.index(rank)) if name == "dp2" else (1, 0)
            for i, rows in enumerate(batches):
                mine = rank_share(rows, mini_batch_size=MINI, dp_rank=dp_rank, dp_size=dp)
                assert got["batches"][i] == mine, (name, i)
                third = sum(source_of(row) == "third" for row in rows) / BATCH
                assert got["shares"][i] == {
                    "sampling/share/third": third,
                    "sampling/share/other": 1 - third,
                }
            assert got["state"] == sampler.state_dict()
