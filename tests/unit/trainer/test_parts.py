"""Parts of the loop that need no ranks: time split, guard, mini-batches, metrics, exit codes."""

import json
import math
import time
from types import SimpleNamespace

import pytest
import torch

from megappo.config.sections import GuardSection
from megappo.distributed.metrics import Tally
from megappo.errors import GuardStop
from megappo.models.packing import Alignment
from megappo.roles.critic import explained_variance, explained_variance_sums
from megappo.trainer.batch_metrics import (
    CRITIC_MEANS,
    MAXIMA,
    MEANS,
    add_batch,
    add_mismatch,
    finish,
)
from megappo.trainer.guard import Guard
from megappo.trainer.micro_batches import (
    MicroBatchPlanner,
    as_mini_batches,
    as_passes,
    with_trained_tokens,
)
from megappo.trainer.scoring import check_error_rate
from megappo.trainer.status import Status
from megappo.trainer.stopwatch import PHASES, Stopwatch
from megappo.types import Completion, Prompt, collate


def batch_of(lengths, reasons=None):
    prompts = [
        Prompt(row=i, token_ids=(1, 2), data_source="d", ground_truth="", extra_info={})
        for i in range(len(lengths))
    ]
    completions = [
        Completion(
            token_ids=(5,) * n,
            log_probs=(-1.0,) * n,
            finish_reason=(reasons or ["stop"] * len(lengths))[i],
            text="",
        )
        for i, n in enumerate(lengths)
    ]
    return collate(prompts, completions)


def test_the_time_split_adds_up_to_the_step():
    entered = []
    watch = Stopwatch(torch.device("cpu"), on_phase=entered.append)
    with watch.phase("generate"):
        time.sleep(0.02)
    with watch.phase("generate"):
        time.sleep(0.01)
    found = watch.metrics()
    assert found["timing_s/generate"] >= 0.03
    parts = sum(found[f"timing_s/{p}"] for p in (*PHASES, "other"))
    assert parts == pytest.approx(found["timing_s/step"])
    assert entered == ["generate", "generate"]


def test_the_status_file_says_what_the_run_does_now(tmp_path):
    status = Status(tmp_path, say=print)
    status.enter("generate", 3)
    first = json.loads((tmp_path / "status.json").read_text())
    status.enter("sync", 3)
    second = json.loads((tmp_path / "status.json").read_text())
    assert (first["step"], first["phase"]) == (3, "generate")
    assert (second["step"], second["phase"]) == (3, "sync")
    assert first["since"] <= second["since"] <= time.time()
    Status(None, say=print).enter("generate", 4)  # another rank's
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize(("found", "stops"), [(0.4, False), (0.6, True), (math.nan, True)])
def test_the_guard_stops_on_a_gap_between_engine_and_trainer(found, stops):
    guard = Guard(settings=GuardSection(max_log_prob_diff=0.5), comparable=True)
    metrics = {"rollout/log_prob_diff_mean": found}
    if stops:
        with pytest.raises(GuardStop, match=r"guard\.max_log_prob_diff \(0\.5\)"):
            guard.check(7, metrics)
    else:
        guard.check(7, metrics)


def test_the_guard_is_silent_where_log_probs_cannot_be_compared_or_it_is_off():
    metrics = {"rollout/log_prob_diff_mean": 3.0}
    Guard(settings=GuardSection(max_log_prob_diff=0.5), comparable=False).check(1, metrics)
    Guard(settings=GuardSection(max_log_prob_diff=0.0), comparable=True).check(1, metrics)


GAP = {
    "rollout/log_prob_diff_mean": 0.2,
    "rollout/log_prob_diff_max": 1.5,
    "rollout/eff_sample_size_token": 0.9,
    "rollout/eff_sample_size_sequence": 0.25,
    "training/empty_updates": 0.0,
    "response_length/clip_ratio": 0.75,
}


def test_a_gap_over_the_warning_threshold_is_told_with_its_figures():
    guard = Guard(settings=GuardSection(warn_log_prob_diff=0.1), comparable=True)
    (text,) = guard.warnings(GAP)
    assert "0.2 nats" in text
    assert "guard.warn_log_prob_diff (0.1)" in text
    assert "largest 1.5, effective sample size 0.900 of the tokens, 0.250 of the responses" in text
    assert len(guard.warnings(GAP | {"rollout/log_prob_diff_mean": math.nan})) == 1


@pytest.mark.parametrize(
    ("limit", "comparable"), [(0.2, True), (0.0, True), (0.1, False)], ids=["at it", "off", "top_p"]
)
def test_no_warning_at_the_threshold_or_where_it_is_off_or_means_nothing(limit, comparable):
    guard = Guard(settings=GuardSection(warn_log_prob_diff=limit), comparable=comparable)
    assert guard.warnings(GAP) == []


def test_updates_without_a_trained_token_are_told_of():
    guard = Guard(settings=GuardSection(warn_log_prob_diff=0.0), comparable=True)
    (text,) = guard.warnings(GAP | {"training/empty_updates": 2.0})
    assert text.startswith("2 updates were skipped")
    assert "75% of the step's were cut" in text
    assert guard.streaks == {}  # no rule has seen them


def test_the_guard_stops_where_rejection_left_nothing():
    guard = Guard(settings=GuardSection(), comparable=True)
    guard.check(1, GAP | {"rollout/rs_rejected_share": 0.99})
    with pytest.raises(GuardStop, match=r"rollout_rs rejected every token.*0\.2 nats"):
        guard.check(1, GAP | {"rollout/rs_rejected_share": 1.0})


def planner(**settings):
    """Of one rank, for what needs no other."""
    context = SimpleNamespace(cp=settings.pop("cp", 1), vp=1, pp=1)
    values = {"mini_batch": 4, "micro_batch": 2, "max_tokens": None, "alignment": Alignment()}
    return MicroBatchPlanner(context=context, **(values | settings))


def test_mini_batches_are_consecutive_and_cover_the_batch():
    batch = batch_of([1, 2, 3, 4, 5, 6, 7, 8])
    plan = planner().plan(batch.total_lengths)
    minis = as_mini_batches(batch, plan, 4)
    assert [[p.row for p in m.samples.prompts] for m in minis] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [m.micro_batches for m in minis] == [((0, 1), (2, 3))] * 2
    assert as_passes(plan, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_mini_batch_without_a_trained_token_is_left_out(alone):
    batch = batch_of([1, 2, 3, 4, 5, 6])
    mask = batch.response_mask.clone()
    mask[2:4] = False
    mask[4] = False  # its sibling is left
    minis = as_mini_batches(batch.with_fields(response_mask=mask), [[[0, 1]]] * 3, 2)
    assert with_trained_tokens(minis, alone) == [minis[0], minis[2]]
    assert with_trained_tokens([minis[1]], alone) == []


def test_log_prob_passes_and_updates_have_the_same_forward_passes():
    """Also where a budget reorders samples: only then is the first ratio exactly 1."""
    batch = batch_of([1, 2, 3, 4, 5, 6, 7, 8])
    plan = [[[2, 0], [1], [3]], [[], [3, 1, 0], [2]]]
    passes = as_passes(plan, 4)
    assert passes == [[2, 0], [1], [3], [], [7, 5, 4], [6]]
    rows = [
        [mini.samples.prompts[i].row for i in micro]
        for mini in as_mini_batches(batch, plan, 4)
        for micro in mini.micro_batches
    ]
    assert rows == passes


def test_a_budget_is_of_one_rank_and_never_passed_by_padding():
    role = SimpleNamespace(use_dynamic_bsz=True, max_token_len_per_gpu=103, micro_batch_size=1)
    align = Alignment(multiple_of=2, cp=2, cp_rank=0)
    made = MicroBatchPlanner.of(role, context=SimpleNamespace(cp=2), alignment=align, mini_batch=4)
    assert made.max_tokens == 204  # 206 over both ranks, down to a multiple of 4


def test_batch_metrics_weigh_tokens_and_samples_as_they_should():
    batch = batch_of([1, 3], ["stop", "length"])
    ones = torch.ones(2, 3)
    batch = batch.with_fields(
        scores=torch.tensor([1.0, 0.0]),
        rewards=torch.tensor([[1.0, 0, 0], [0, 0, 0]]),
        old_log_probs=torch.tensor([[-1.0, 9, 9], [-1.0, -1.0, -1.5]]),
        advantages=ones,
        returns=ones,
        values=2 * ones,
    )
    tally = Tally()
    add_batch(tally, batch, torch.tensor([[1.0, 9, 9], [2.0, 2.0, 3.0]]))
    add_mismatch(tally, batch)
    means = {name: total / count for name, (total, count) in tally.sums.items()}
    assert set(means) == {*MEANS, *CRITIC_MEANS}
    assert set(tally.maxima) == set(MAXIMA)
    assert means["critic/score/mean"] == 0.5
    assert means["response_length/mean"] == 2.0
    assert means["response_length/clip_ratio"] == 0.5
    assert means["actor/entropy"] == 2.0
    assert means["rollout/log_prob_diff_mean"] == pytest.approx(0.125)
    assert tally.maxima["rollout/log_prob_diff_max"] == pytest.approx(0.5)
    assert means["rollout/log_prob_diff_over_0.1"] == 0.25
    assert means["rollout/k3_kl"] == pytest.approx((math.exp(-0.5) + 0.5 - 1) / 4)
    found = finish({**means, **tally.maxima})
    assert found["critic/score/min"] == 0.0
    w = math.exp(-0.5)
    assert found["rollout/eff_sample_size_token"] == pytest.approx((3 + w) ** 2 / 4 / (3 + w**2))
    assert found["rollout/eff_sample_size_sequence"] == pytest.approx((1 + w) ** 2 / 2 / (1 + w**2))
    assert not [name for name in found if "weight" in name or "neg_min" in name]


def test_a_score_of_a_failed_reward_is_in_no_figure_of_scores():
    batch = batch_of([1, 3]).with_scores(torch.tensor([0.0, -2.0]), torch.tensor([True, False]))
    batch = batch.with_fields(rewards=torch.tensor([[0.0, 0, 0], [0, 0, -2.0]]))
    tally = Tally()
    add_batch(tally, batch, torch.zeros(2, 3))
    assert tally.sums["critic/score/mean"] == tally.sums["critic/rewards/mean"] == (-2.0, 1.0)
    assert tally.maxima["critic/score/max"] == -2.0
    nothing = Tally()
    add_batch(
        nothing, batch.with_scores(torch.zeros(2), torch.tensor([True, True])), torch.zeros(2, 3)
    )
    assert nothing.sums["critic/score/mean"] == (0.0, 0.0)
    assert "critic/score/min" not in finish(
        {"rollout/token_weight": 1.0, "rollout/token_weight_sq": 1.0,
         "rollout/sequence_weight": 1.0, "rollout/sequence_weight_sq": 1.0, **nothing.maxima}
    )  # fmt: skip


def test_a_nan_log_prob_shows_in_the_difference():
    batch = batch_of([2]).with_fields(old_log_probs=torch.tensor([[-1.0, math.nan]]))
    tally = Tally()
    add_mismatch(tally, batch)
    assert tally.maxima["rollout/log_prob_diff_max"] == math.inf


def test_explained_variance_adds_up_over_ranks():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    returns = values + 0.3 * torch.randn(4, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=generator) > 0.3
    parts = [explained_variance_sums(values[r], returns[r], mask[r]) for r in ([0, 1], [2, 3])]
    r, e = returns[mask].double(), (returns - values)[mask].double()
    expected = 1 - e.var(correction=0) / r.var(correction=0)
    assert explained_variance(sum(parts)) == pytest.approx(expected.item(), abs=1e-9)


def test_explained_variance_of_nothing_or_of_a_constant_is_zero():
    mask = torch.ones(1, 2, dtype=torch.bool)
    same = torch.full((1, 2), 3.0)
    assert explained_variance(explained_variance_sums(same, same, ~mask)) == 0.0
    assert explained_variance(explained_variance_sums(same, same, mask)) == 0.0


def test_a_maximum_shows_nan_as_infinity():
    tally = Tally()
    tally.add_max("x", 1.0)
    tally.add_max("x", math.nan)
    assert tally.maxima == {"x": math.inf}


def test_means_add_sums_and_counts():
    first, second = Tally(), Tally()
    first.add("x", 1.0, 4)
    second.add("x", 5.0, 1)
    first.merge(second)
    assert first.sums == {"x": (6.0, 5)}


@pytest.mark.parametrize(("rate", "stops"), [(0.05, False), (0.051, True)])
def test_too_many_failed_rewards_end_the_run(rate, stops):
    if stops:
        with pytest.raises(RuntimeError, match=r"over reward\.max_error_rate \(5\.0%\)"):
            check_error_rate(rate, 0.05)
    else:
        check_error_rate(rate, 0.05)
