"""Runs on given answers, as far as no model is needed."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.config import SupervisedConfig, load_any
from megappo.config.guard import GuardRule, GuardSection
from megappo.data.sampler import PromptSampler
from megappo.errors import GuardStop, SaveError, StopRequested
from megappo.trainer.guard import Guard
from megappo.trainer.profiler import StepProfiler
from megappo.trainer.supervised.build import rules_of
from megappo.trainer.supervised.fit import SupervisedRun, export_folder, is_finished
from megappo.trainer.supervised.trainer import SupervisedTrainer
from megappo.trainer.teller import Teller
from tests.unit.trainer.loop_parts import FULL, Place


def make_config(folder: Path, *overrides: str) -> SupervisedConfig:
    path = folder / "rm.yaml"
    path.write_text(
        f"task: rm\nmodel: {{path: {folder}/model}}\n"
        f"data: {{train_files: [{folder}/a.parquet], val_files: [{folder}/b.parquet]}}\n"
        f"trainer: {{run_dir: {folder}/run}}\n"
    )
    config = load_any(path, overrides)
    assert isinstance(config, SupervisedConfig)
    return config


@pytest.mark.parametrize(
    ("exported", "resumed", "expected"),
    [(None, 40, False), (20, 40, False), (40, 40, True), (40, 39, False), (20, 20, False)],
)
def test_an_older_export_is_not_taken_for_this_runs(tmp_path, exported, resumed, expected):
    config = make_config(tmp_path)
    export_folder(config).mkdir(parents=True)
    if exported is not None:
        text = json.dumps({"step": exported})
        (export_folder(config) / "megappo_step.json").write_text(text)
    assert is_finished(config, resumed_step=resumed, total_steps=40) == expected


def test_a_run_without_an_export_is_finished_by_its_last_step(tmp_path):
    config = make_config(tmp_path, "checkpoint.export_hf=false")
    assert is_finished(config, resumed_step=40, total_steps=40)
    assert not is_finished(config, resumed_step=39, total_steps=40)


@pytest.mark.parametrize(("task", "other"), [("rm", "sft/loss"), ("sft", "actor/loss")])
def test_a_rule_over_a_metric_of_another_task_is_told_after_the_first_step(tmp_path, task, other):
    config = make_config(tmp_path, f"task={task}")
    own = {f"{task}/grad_norm", f"{task}/loss"}
    rules = rules_of(config)
    assert set(rules["non_finite"].metrics) == set(rules["non_finite_again"].metrics) == own
    rules["mine"] = GuardRule(metrics=[f"{task}/loss", other], above=9.0)
    guard = Guard(settings=GuardSection(rules=rules), comparable=False)
    trainer = FirstStep(
        context=None, train_set=None, val_set=None, sampler=make_sampler(), learner=None,
        planner=None, guard=guard, utilization=None,
    )  # fmt: skip
    told: list[str] = []
    make_run(config, trainer, say=told.append)._step()
    assert told == [
        f"warning    step 1: guard.rules.mine watches {other}, which the first step does not have"
    ]


class FirstStep(SupervisedTrainer):
    """A step whose update was skipped: it has no loss."""

    def step(self):
        self.step_number = 1
        return {"training/epoch": 0.0}

    def validate(self):
        return {}


def make_sampler() -> PromptSampler:
    return PromptSampler(12, batch_size=4, seed=0, shuffle=True)


def make_run(
    config, trainer, *, saver=None, say=lambda text: None, teller=None, stop=str, restarts=0
) -> SupervisedRun:
    profiler = StepProfiler(
        steps=(), folder=Path("none"), rank=0, device=torch.device("cpu"), max_gb=1.0,
        report=lambda step, text, details: None,
    )  # fmt: skip
    return SupervisedRun(
        config=config, trainer=trainer, saver=saver or NotesState(trainer),
        teller=teller or Teller(say=say, loggers=[], records=None), profiler=profiler,
        total_steps=3, changes=(), stop_requested=stop, restarts=restarts,
    )  # fmt: skip


class WithoutModel(SupervisedTrainer):
    """Draws rows and asks the guard, as a step does; there is nothing to update."""

    def step(self):
        self.sampler.next_batch()
        self.guard.admit(self.step_number + 1, {"rm/grad_norm": math.nan})
        raise AssertionError("the rule holds")


class NotesState:
    """In place of a saver: what would be in the checkpoint."""

    def __init__(self, trainer: SupervisedTrainer) -> None:
        self.trainer = trainer
        self.saved: list[tuple[int, Any]] = []

    def save_now(self, step: int) -> None:
        self.saved.append((step, self.trainer.sampler.state_dict()))

    def take_metrics(self) -> dict[str, float]:
        return {}


def test_a_step_that_a_guard_gave_up_is_drawn_again_after_a_resume(tmp_path):
    rule = GuardRule(metrics=["rm/grad_norm"], non_finite=True, action="save_and_stop")
    sampler = make_sampler()
    sampler.next_batch()
    before = sampler.state_dict()
    trainer = WithoutModel(
        context=None, train_set=None, val_set=None, sampler=sampler, learner=None, planner=None,
        utilization=None,
        guard=Guard(settings=GuardSection(rules={"nan": rule}), comparable=False), step_number=1,
    )  # fmt: skip
    saver = NotesState(trainer)
    run = make_run(make_config(tmp_path), trainer, saver=saver)
    with pytest.raises(GuardStop, match="stopped after step 1, state saved"):
        run._step()
    assert saver.saved == [(1, before)]
    assert before["position"] == 4


class EmptySteps(SupervisedTrainer):
    """Draws rows and validates; updates nothing. Is asked to stop after a step, if given."""

    place: Place
    stop_after = 0

    def step(self):
        _, rows = self.sampler.next_batch()
        self.step_number += 1
        if self.step_number == self.stop_after:
            self.place.stop = "SIGTERM"
        return {"rm/loss": float(sum(rows))}

    def validate(self):
        return {"val/loss": self.step_number / 8}


def looping(place: Place, *, stop_after=0, restarts=0) -> SupervisedRun:
    """Three steps, of which the second and the last are validated."""
    config = make_config(
        place.run_dir, "checkpoint.export_hf=false", "trainer.val_before_train=false",
        "trainer.test_freq=2", "guard.check_ranks_every=0",
    )  # fmt: skip
    guard = Guard(settings=GuardSection(rules={}), comparable=False)
    trainer = EmptySteps(
        context=place.context, train_set=None, val_set=None, sampler=make_sampler(), learner=None,
        planner=None, guard=guard, utilization=None,
    )  # fmt: skip
    trainer.place, trainer.stop_after = place, stop_after

    def state():
        return {
            "step": trainer.step_number, "sampler": trainer.sampler.state_dict(),
            "guard": guard.state_dict(),
        }  # fmt: skip

    return make_run(
        config, trainer, saver=place.saver(state), teller=place.teller, stop=lambda: place.stop,
        restarts=restarts,
    )  # fmt: skip


@pytest.fixture
def place(tmp_path, alone):
    return Place(tmp_path, alone)


def test_a_stop_saves_before_a_due_validation_and_the_resumed_run_makes_up_for_it(
    tmp_path, alone, place
):
    undisturbed = Place(tmp_path / "undisturbed", alone)
    looping(undisturbed).fit(None)
    with pytest.raises(StopRequested, match="after step 2, before its validation; state saved"):
        looping(place, stop_after=2).fit(None)
    assert sorted(place.logger.rows) == [1]
    place.stop = ""
    looping(place).fit(place.store.folder / "2")
    assert place.logger.rows == undisturbed.logger.rows
    assert sorted(place.logger.rows) == [1, 2, 3]
    state = place.store.load(place.store.folder / "2", {}, seed=0)
    assert (state["val_score"], state["unvalidated"]) == (-0.25, None)


def test_a_stop_whose_save_fails_is_a_failure(place):
    place.store.problem = FULL
    with pytest.raises(SaveError, match="the state of step 2 is not saved"):
        looping(place, stop_after=2).fit(None)


def test_weights_that_are_not_finite_are_told_everywhere(place):
    place.store.problem = GuardStop("step 2: rm's w is not finite")
    with pytest.raises(GuardStop):
        looping(place).fit(None)
    assert place.events("guard") == [
        {"kind": "guard", "step": 2, "action": "stop", "reason": "rm's w is not finite"}
    ]
    assert place.logger.notes == ["guard: stop: rm's w is not finite"]


def test_a_restart_is_an_event_also_where_there_is_no_checkpoint_yet(place):
    looping(place, restarts=2).fit(None)
    assert place.events("restarted") == [{"kind": "restarted", "step": 0, "restarts": 2}]
    assert not place.events("resumed")
