"""Saves on two ranks: which are kept, what a full disk, short memory and broken weights lead to."""

import pytest
import torch

from tests.distributed.launch import run_ranks
from tests.tiny_run import make_run

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module", params=["dp2", "tp2"])
def ranks(request, config, tmp_path_factory):
    out = tmp_path_factory.mktemp(request.param)
    overrides = ["parallel.tp=2"] if request.param == "tp2" else []
    run_ranks("saving.py", 2, "--config", str(config), "--out", str(out), *overrides, timeout_s=240)
    return request.param, [torch.load(out / f"rank{r}.pt", weights_only=True) for r in range(2)]


def test_a_model_without_a_step_is_saved_and_goes_on(ranks):
    for rank in ranks[1]:
        found, expected = rank["untrained"]["resumed"], rank["untrained"]["went_on"]
        assert found["norms"] == expected["norms"]
        for name, weight in expected["weights"].items():
            assert torch.equal(found["weights"][name], weight), name


def test_the_newest_the_best_and_every_kth_are_kept(ranks):
    for rank in ranks[1]:
        found = rank["policies"]
        assert found["under_way"] == 6  # a save was still open when the last step was over
        assert found["steps"] == [2, 3, 6]
        assert found["best"] == "step_000002\n"
        assert found["latest"] == "step_000006\n"
        assert found["events"] == [("saved", step) for step in range(1, 7)]
        assert found["metrics"]["timing_s/save"] > 0
        assert found["metrics"]["training/failed_saves"] == 0


def test_a_step_that_is_saved_again_after_a_roll_back_keeps_its_validation_score(ranks):
    for rank in ranks[1]:
        assert rank["policies"]["scores_again"] == [0.5, None]  # later steps' scores are forgotten
        assert rank["policies"]["best_again"] == "step_000002\n"


def test_a_resumed_run_clears_what_killed_saves_left(ranks):
    for rank in ranks[1]:
        step, names = rank["policies"]["after_resume"]
        assert step == 3
        assert names == ["best", "latest", "step_000002", "step_000003", "step_000006"]


def test_a_save_that_fails_on_one_rank_is_told_on_all_and_tried_again(ranks):
    for rank in ranks[1]:
        found = rank["full_disk"]
        failed = found["failed"]
        assert failed["events"] == [("saved", 1), ("save_failed", 2)]
        assert failed["left"] == ["latest", "step_000001"]
        (warning,) = failed["said"]
        assert "the checkpoint of step 2 failed on rank 1: " in warning
        assert "File too large" in warning
        assert "the last checkpoint is" in warning
        assert "step_000001; it is tried again" in warning
        assert found["steps"] == [1, 4]
        assert found["events"] == [("saved", 4)]
        assert found["failures"] == 3


def test_a_state_that_cannot_be_saved_at_the_end_is_an_error(ranks):
    for rank in ranks[1]:
        at_end = rank["full_disk"]["at_the_end"]
        kind, text = at_end["raised"]
        assert kind == "SaveError"
        assert "the state of step 3 is not saved; the last checkpoint is" in text
        kind, text = rank["full_disk"]["stopped"]
        assert kind == "SaveError"
        assert "the checkpoint of step 3 failed on rank 1" in text
        assert at_end["events"] == [("save_failed", 3)] * 3  # twice, and once with `stop`


def test_where_memory_is_short_the_save_is_in_line(ranks):
    for rank in ranks[1]:
        found = rank["short_memory"]
        assert found["steps"] == [1]  # at once
        assert [kind for kind, _ in found["events"]] == ["saving_in_line", "saved"]
        assert "host memory" in found["said"][0]


def test_weights_that_are_not_finite_are_never_saved(ranks):
    for rank in ranks[1]:
        kind, text = rank["not_finite"]["raised"]
        assert kind == "GuardStop"
        assert "the actor is not finite: " in text
        assert "(rank 1; 1 ranks have any); it is not saved, and the last checkpoint is" in text
        assert rank["not_finite"]["steps"] == [1]


def test_one_bit_of_difference_between_ranks_is_found_and_named(ranks):
    layout, both = ranks
    for rank in both:
        found = rank["drift"]
        assert found["compared"] == found["names"]
        kind, text = found["raised"]
        assert kind == "RanksDifferError"
        assert "decoder.layers.0.input_layernorm.weight" in text
        between = {"dp2": "data-parallel", "tp2": "tensor-parallel"}[layout]
        assert f"the actor's weights differ between {between} ranks" in text
        assert "ranks 0 against 1 (1 of " in text
