"""The loop around PPO steps: how it ends, what it saves by then, and what it tells.

The steps are empty ones; the loop, its saver and its guard are real.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megappo.config import Config
from megappo.config.guard import GuardRule, GuardSection
from megappo.config.sections import CheckpointSection, TrainerSection
from megappo.data.sampler import PromptSampler
from megappo.errors import GuardStop, RanksDifferError, SaveError, StopRequested
from megappo.ppo.kl import FixedKLController
from megappo.rollout.recovery import EnginesLost, Incidents, Restart
from megappo.trainer import fit
from megappo.trainer.adjustments import Adjustments
from megappo.trainer.fit import Run
from megappo.trainer.guard import Guard
from megappo.trainer.profiler import StepProfiler
from megappo.trainer.run_state import progress
from tests.unit.trainer.loop_parts import FULL, Place


@dataclass
class EmptySteps:
    """In place of a `PPOTrainer`: draws prompts and asks whether to stop; updates nothing."""

    place: Place
    guard: Guard
    stop_in: int = 0
    """step in which a stop is asked for, before or after its update"""
    stops_before_update: bool = False
    problem: Exception | None = None
    """that the second step meets"""
    step_number: int = 0
    restarts: tuple[Restart, ...] = ()
    """of engines since they were asked for"""

    def __post_init__(self):
        self.context = self.place.context
        self.sampler = PromptSampler(14, batch_size=4, seed=0, shuffle=True)
        self.estimator = SimpleNamespace(kl_controller=FixedKLController(0.0))
        self.adjustments, self.trainables, self.last_batch = Adjustments(), {}, None
        self.rollouts, self.plan = SimpleNamespace(engine=self), None

    def step(self, *, may_stop):
        number = self.step_number + 1
        _, rows = self.sampler.next_batch()
        if number == self.stop_in and self.stops_before_update:
            self.place.stop = "SIGTERM"
        may_stop()
        if number == self.stop_in:
            self.place.stop = "SIGTERM"
        if number == 2 and self.problem is not None:
            raise self.problem
        self.step_number = number
        self.restarts = (Restart(rank=0, reason="it died"),)
        return {
            "rows": float(sum(rows)), "third": number / 3, "rollout/log_prob_diff_mean": 0.0,
            "training/empty_updates": 0.0,
        }  # fmt: skip

    def take_incidents(self):
        found, self.restarts = Incidents(restarts=self.restarts, num_aborted=0), ()
        return found

    def push_weights(self):
        return {}

    def on_phase(self, step, phase):
        pass


@dataclass
class Validation:
    """In place of an `Evaluator`."""

    trainer: EmptySteps
    problem: Exception | None = None
    steps: list[int] = field(default_factory=list)

    def run(self, rollouts):
        if self.problem is not None:
            raise self.problem
        self.steps.append(self.trainer.step_number)
        return {"val/score/mean": self.trainer.step_number / 8}


def make_run(place: Place, *, total=4, rules: Any = None, settings: Any = None, **steps) -> Run:
    guard = Guard(settings=GuardSection(rules=rules or {}), comparable=False)
    trainer = EmptySteps(place, guard, **steps)
    config = Config(
        checkpoint=CheckpointSection(export_hf=False),
        guard=GuardSection(snapshot_every=0, check_ranks_every=2, rules={}),
        trainer=TrainerSection(run_dir=str(place.run_dir), test_freq=2, val_before_train=False),
    )

    def state():
        guarded = guard.state_dict() | {"adjustments": trainer.adjustments.state_dict()}
        return {**progress(trainer), "guard": guarded}

    return Run(
        config=config, trainer=trainer, evaluator=Validation(trainer),
        saver=place.saver(state, **(settings or {})), teller=place.teller,
        profiler=StepProfiler(
            steps=(), folder=place.run_dir, rank=0, device=torch.device("cpu"), max_gb=1.0,
            report=lambda step, text, details: None,
        ),
        tokenizer=None, total_steps=total, changes=(), stop_requested=lambda: place.stop,
        local_world_size=1, restarts=0,
    )  # fmt: skip


@pytest.fixture
def place(tmp_path, alone):
    return Place(tmp_path, alone)


@pytest.fixture
def undisturbed(tmp_path, alone):
    place = Place(tmp_path / "undisturbed", alone)
    make_run(place).fit(None)
    assert sorted(place.logger.rows) == [1, 2, 3, 4]
    return place.logger.rows


def resumed(place: Place, **changes) -> Run:
    """From the newest state, in a new process."""
    place.stop, place.store.problem = "", None
    run = make_run(place, **changes)
    run.fit(place.store.folder / str(max(place.store.states)))
    return run


def test_a_stop_before_an_update_saves_and_the_same_run_goes_on(place, undisturbed):
    run = make_run(place, stop_in=2, stops_before_update=True)
    with pytest.raises(StopRequested, match=r"^stopped by SIGTERM after step 1; state saved$"):
        run.fit(None)
    assert list(place.store.states) == [1]
    resumed(place)
    assert place.logger.rows == undisturbed


@pytest.mark.parametrize("before", [True, False])
def test_a_stop_whose_save_fails_is_a_failure_before_an_update_as_after_it(place, before):
    run = make_run(place, stop_in=3, stops_before_update=before)
    place.store.problem = FULL
    with pytest.raises(SaveError, match=f"the state of step {2 if before else 3} is not saved"):
        run.fit(None)


def test_a_stop_before_the_first_update_has_nothing_to_save(place):
    place.store.problem = FULL
    with pytest.raises(StopRequested, match="after step 0; nothing to save before the first step"):
        make_run(place, stop_in=1, stops_before_update=True).fit(None)


def test_a_stop_saves_before_a_due_validation_and_the_resumed_run_makes_up_for_it(
    place, undisturbed
):
    run = make_run(place, stop_in=2)
    with pytest.raises(StopRequested, match="after step 2, before its validation; state saved"):
        run.fit(None)
    assert (run.evaluator.steps, sorted(place.logger.rows)) == ([], [1])
    run = resumed(place)
    assert run.evaluator.steps == [2, 4]
    assert place.logger.rows == undisturbed
    state = place.store.load(place.store.folder / "2", {}, seed=0)
    assert (state["val_score"], state["unvalidated"]) == (0.25, None)
    assert len(place.events("engine_restarted")) == 4


def test_a_start_that_is_to_stop_at_once_leaves_the_validation_to_the_next(place, undisturbed):
    for _ in range(2):
        run = make_run(place, stop_in=2)
        checkpoint = place.store.folder / "2" if place.store.states else None
        with pytest.raises(StopRequested, match="after step 2, before its validation"):
            run.fit(checkpoint)
    resumed(place)
    assert place.logger.rows == undisturbed


def test_a_validation_that_was_made_up_for_ends_a_run_once(place):
    """What a rule makes of it is saved, so that the next start goes on."""
    rule = GuardRule(metrics=["val/score/mean"], below=0.3, action="save_and_stop")
    with pytest.raises(StopRequested):
        make_run(place, stop_in=2, rules={"low": rule}).fit(None)
    with pytest.raises(GuardStop, match=r"step 2: val/score/mean was 0\.25"):
        resumed(place, rules={"low": rule})
    run = resumed(place, rules={"low": rule})
    assert run.evaluator.steps == [4]


def test_the_last_step_is_validated_also_on_a_stop(place, undisturbed):
    run = make_run(place, stop_in=4)
    run.fit(None)
    assert run.evaluator.steps == [2, 4]
    assert place.logger.rows == undisturbed


def test_a_step_whose_updates_ask_for_an_answer_is_validated_before_it_is_saved(place):
    rule = GuardRule(metrics=["actor/grad_norm"], above=5.0, action="skip_update")
    run = make_run(place, stop_in=2, rules={"spike": rule})
    step = run.trainer.step

    def guarded(*, may_stop):
        found = step(may_stop=may_stop)
        assert not run.trainer.guard.admit(run.trainer.step_number, {"actor/grad_norm": 9.0})
        return found

    run.trainer.step = guarded
    with pytest.raises(StopRequested, match=r"after step 2; state saved"):
        run.fit(None)
    assert run.evaluator.steps == [2]
    assert [event["step"] for event in place.events("guard")] == [1, 2]


def test_engines_that_are_lost_in_a_validation_leave_it_to_the_resumed_run(place, undisturbed):
    run = make_run(place)
    run.evaluator.problem = EnginesLost("all of them")
    with pytest.raises(EnginesLost):
        run.fit(None)
    assert "val/score/mean" not in place.logger.rows[2]
    resumed(place)
    assert place.logger.rows == undisturbed


REASON = "algorithm.rollout_rs rejected every token"


def test_a_guards_stop_before_the_update_is_told_everywhere(place):
    run = make_run(place, problem=GuardStop(f"step 2: {REASON}"))
    with pytest.raises(GuardStop):
        run.fit(None)
    assert place.events("guard") == [
        {"kind": "guard", "step": 2, "action": "stop", "reason": REASON}
    ]
    assert f"guard      step 2: stop: {REASON}" in place.screen
    assert place.logger.notes == [f"guard: stop: {REASON}"]


@pytest.mark.parametrize("stop_in", [0, 2])
def test_weights_that_are_not_finite_are_told_everywhere(place, stop_in):
    run = make_run(place, stop_in=stop_in)
    place.store.problem = GuardStop("step 2: actor's w is not finite; it is not saved")
    with pytest.raises(GuardStop):
        run.fit(None)
    (event,) = place.events("guard")
    assert (event["step"], event["action"]) == (2, "stop")
    assert event["reason"] == "actor's w is not finite; it is not saved"
    assert place.logger.notes == ["guard: stop: actor's w is not finite; it is not saved"]


def test_the_rule_that_ends_a_run_is_told_also_where_weights_are_not_finite(place):
    rule = GuardRule(metrics=["rows"], above=0.0, action="save_and_stop")
    run = make_run(place, rules={"mine": rule})
    place.store.problem = GuardStop("step 1: actor's w is not finite")
    with pytest.raises(GuardStop, match=r"rows was .* state not saved: step 1: actor's w is not"):
        run.fit(None)
    (event,) = place.events("guard")
    assert (event["rule"], event["action"]) == ("mine", "save_and_stop")


def test_ranks_that_differ_end_the_run_before_that_step_is_saved(place, monkeypatch):
    found = RanksDifferError("actor: w differs between DP ranks 0 and 1")
    monkeypatch.setattr(
        fit, "compare_roles", lambda trainer, metrics: found if trainer.step_number == 4 else None
    )
    run = make_run(place, total=6)
    with pytest.raises(RanksDifferError, match="w differs"):
        run.fit(None)
    assert place.events("ranks_differ") == [{"kind": "ranks_differ", "step": 4, "text": str(found)}]
    assert (list(place.store.states), sorted(place.logger.rows)) == ([2], [1, 2, 3, 4])
    assert run.evaluator.steps == [2]


def test_the_end_of_an_epoch_is_told(place):
    make_run(place, total=7).fit(None)
    assert place.events("epoch_over") == [
        {"kind": "epoch_over", "step": step, "epoch": epoch, "rows": 12}
        for epoch, step in ((1, 3), (2, 6))
    ]
    text = "12 rows drawn, 2 left out as no full batch"
    assert [line for line in place.screen if line.startswith("data")] == [
        f"data       epoch 1 is over after step 3: {text}",
        f"data       epoch 2 is over after step 6: {text}",
    ]
