"""The loop around steps: resume, validate, log, save, stop.

What a step's line in metrics.jsonl says is written before its checkpoint, so a run that is killed
in between repeats that step and replaces the line with the same numbers. A run that is to stop does
not validate first: the checkpoint keeps what is known of the step, and the resumed run ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from megappo.config import Config
from megappo.data.sampler import num_ended
from megappo.distributed.parallel import all_gather_objects, all_ranks_or_none
from megappo.errors import GuardStop, RanksDifferError, SaveError, StopRequested
from megappo.rollout.recovery import EnginesLost
from megappo.trainer.adjustments import Adjustments
from megappo.trainer.evaluate import Evaluator, val_score
from megappo.trainer.export import export_actor
from megappo.trainer.guard import StepAbandoned
from megappo.trainer.out_of_memory import MemoryLost, OutOfMemoryNotes
from megappo.trainer.ppo_trainer import PPOTrainer
from megappo.trainer.profiler import StepProfiler
from megappo.trainer.rank_agreement import compare_roles
from megappo.trainer.response import Responder, make_responder
from megappo.trainer.run_state import load_progress, progress
from megappo.trainer.saver import Saver
from megappo.trainer.step_report import count_incidents, tell_epochs, tell_samples, warn
from megappo.trainer.stopping import stop_agreed
from megappo.trainer.teller import Teller


class StopHere(RuntimeError):  # noqa: N818, an outcome and not a mistake
    """A step is given up before it has updated anything."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A built trainer with what surrounds it."""

    config: Config
    trainer: PPOTrainer
    evaluator: Evaluator | None
    saver: Saver
    teller: Teller
    profiler: StepProfiler
    tokenizer: Any
    total_steps: int
    changes: Sequence[str]
    """what differs from the run that wrote the checkpoint resumed from"""
    stop_requested: Callable[[], str]
    """Why this rank was asked to stop; empty if it was not."""
    local_world_size: int
    """ranks of this node"""
    restarts: int
    """by torchrun or Slurm, for the events"""

    def fit(self, checkpoint: Path | None) -> None:
        """Trains to the end. Collective over the world.

        Raises:
            StopRequested: a signal came, or the time is over; the state is saved.
            GuardStop: a guard ended the run.
            EnginesLost: an engine failed more often than `rollout.max_restarts` allows; the state
                is saved, if a step was begun.
            RanksDifferError: ranks do not hold the same weights; the step is not saved.
            SaveError: see `Saver`.
        """
        try:
            self._fit(checkpoint)
        except (GuardStop, RanksDifferError):
            self._enter("save")
            self.saver.finish_earlier()
            raise

    def _fit(self, checkpoint: Path | None) -> None:
        trainer = self.trainer
        responder = make_responder(
            self.config,
            trainer,
            self,
            saver=self.saver,
            local_world_size=self.local_world_size,
        )
        unvalidated = None
        if checkpoint is not None:
            unvalidated = self._resume(checkpoint)
            responder.apply_adjustments()
        self.teller.tell_start(
            trainer.step_number, checkpoint, changes=self.changes, restarts=self.restarts
        )
        self._answer_old_out_of_memory(responder)
        responder.keep(trainer.step_number)
        self._enter("sync")
        pushed = trainer.push_weights()
        self.teller.event("pushed", trainer.step_number, **pushed)
        if checkpoint is None and self.config.trainer.val_before_train:
            first = {**pushed, **self._validate()}
            self._count_incidents(0, first)
            self._log(0, first)
        if unvalidated is not None:
            self._make_up(unvalidated, responder)
        while trainer.step_number < self.total_steps:
            metrics = self._step(responder)
            if metrics is None:
                continue
            step = trainer.step_number
            responder.keep(step)
            is_last = step == self.total_steps
            why = self._stop_agreed()
            self._save_validated(step, metrics, wait=is_last or bool(why))
            if why and not is_last:
                raise StopRequested(f"stopped by {why} after step {step}; state saved")
        if self.config.checkpoint.export_hf:
            self._enter("export")
            out = export_actor(self.config, trainer)
            self.teller.event("exported", trainer.step_number, path=str(out))
        self._enter("done")

    def _make_up(self, row: Mapping[str, float], responder: Responder) -> None:
        """Ends the step that was saved before its validation, with the metrics `row` until then.

        Collective over the world.
        """
        step = self.trainer.step_number
        self.teller.forget(step)
        self.saver.rewind(step)
        metrics = self._end_step(dict(row), responder, ended_before=num_ended(self.trainer.sampler))
        if metrics is not None:
            self._save_validated(step, metrics, must=True)

    def _step(self, responder: Responder) -> Mapping[str, float] | None:
        """One step and the validation that is due after it, logged; None if it was taken back.

        Collective over the world. Returns the step's metrics.

        Raises:
            GuardStop: a guard ended the run.
            StopRequested: see `fit`; the step was given up before it updated anything, or is done
                but for its validation.
            SaveError: the state could not be saved then.
            EnginesLost: an engine failed too often; the state is saved. A step that was not applied
                is not counted, and a resumed run draws its prompts again.
        """
        trainer = self.trainer
        sampler, ended_before = trainer.sampler.state_dict(), num_ended(trainer.sampler)
        number = trainer.step_number + 1
        given_up: StepAbandoned | MemoryLost | None = None
        try:
            with self.teller.guard_stops(number), self.profiler.recording(number):
                metrics = dict(trainer.step(may_stop=self._stop_here))
                if number in self.profiler.steps:
                    self._enter("profile")
        except (StepAbandoned, MemoryLost) as caught:
            # Without what it holds of the pass that failed: going back needs the memory.
            given_up = caught.with_traceback(None)
            given_up.__context__ = None
        except StopHere as stop:
            trainer.sampler.load_state_dict(sampler)
            self._stop(f"stopped by {stop} after step {trainer.step_number}")
        except torch.OutOfMemoryError as error:
            self._out_of_memory().note(trainer.adjustments, number, str(error))
            raise
        except EnginesLost:
            trainer.sampler.load_state_dict(sampler)
            self._count_incidents(number, {})
            self.teller.say(f"engines    {self.save(trainer.step_number)}")
            raise
        if given_up is not None:
            self._count_incidents(number, {})
            responder.take_back(given_up)
            return None
        return self._end_step(metrics, responder, ended_before=ended_before)

    def _end_step(
        self, metrics: dict[str, float], responder: Responder, *, ended_before: int
    ) -> Mapping[str, float] | None:
        """Compares ranks, validates, logs and asks the guard, after a step's updates.

        Collective over the world. Returns the metrics; None if the step was taken back.

        Args:
            metrics: of the step so far; are added to.
            responder: for what guards decide.
            ended_before: epochs that were over before the step.
        """
        trainer, config, step = self.trainer, self.config, self.trainer.step_number
        self._count_incidents(step, metrics)
        metrics["guard/actions"] = float(trainer.guard.num_actions)
        problem = None
        if not config.parallel.fsdp and _is_due(step, config.guard.check_ranks_every):
            problem = compare_roles(trainer, metrics)
        every, is_last = config.trainer.test_freq, step == self.total_steps
        if problem is None and (_is_due(step, every) or (is_last and every > 0)):
            # What updates asked for must be answered before the step is saved.
            if not is_last and not trainer.guard.decided and (why := self._stop_agreed()):
                self._stop_unvalidated(step, metrics, why, ended_before=ended_before)
            self._validate_step(step, metrics)
        self._log(step, metrics)
        warn(self.teller, trainer.guard, step, metrics)
        if problem is not None:
            self.teller.event("ranks_differ", step, text=str(problem))
            raise problem
        if responder.respond(trainer.guard.after_step(step, metrics)):
            return None
        tell_epochs(self.teller, trainer.sampler, step, ended_before=ended_before)
        return metrics

    def _stop_unvalidated(
        self, step: int, metrics: Mapping[str, float], why: str, *, ended_before: int
    ) -> NoReturn:
        """Saves a step that the resumed run will validate and log. Collective over the world."""
        self._tell_samples(step)
        tell_epochs(self.teller, self.trainer.sampler, step, ended_before=ended_before)
        self.saver.note_unvalidated(step, metrics)
        self._stop(f"stopped by {why} after step {step}, before its validation")

    def _stop(self, text: str) -> NoReturn:
        """Saves, and ends the run on request. Collective over the world.

        Raises:
            StopRequested: the state is saved, if a step was finished.
            SaveError: it is not.
            GuardStop: weights or moments are not finite.
        """
        step = self.trainer.step_number
        with self.teller.guard_stops(step):
            saved = self._save_or_raise(step)
        raise StopRequested(f"{text}; {saved}")

    def _validate_step(self, step: int, metrics: dict[str, float]) -> None:
        """Adds the validation's metrics. Collective over the world.

        Raises:
            EnginesLost: the step is logged without, and saved; the resumed run validates it.
        """
        try:
            metrics |= self._validate()
        except torch.OutOfMemoryError as error:
            self._out_of_memory().note(self.trainer.adjustments, step, str(error))
            raise
        except EnginesLost:
            self._count_incidents(step, metrics)
            self._log(step, metrics)
            self.saver.note_unvalidated(step, metrics)
            self.teller.say(f"engines    {self.save(step)}")
            raise
        self._count_incidents(step, metrics)

    def _stop_agreed(self) -> str:
        """Why the run is to stop, if any rank was asked to. Collective over the world."""
        return stop_agreed(self.stop_requested(), self.trainer.context)

    def _stop_here(self) -> None:
        """Collective over the world.

        Raises:
            StopHere: on all ranks, if any was asked to stop.
        """
        if why := self._stop_agreed():
            raise StopHere(why)

    def _out_of_memory(self) -> OutOfMemoryNotes:
        return OutOfMemoryNotes(Path(self.config.trainer.run_dir), self.trainer.context.rank)

    def _answer_old_out_of_memory(self, responder: Responder) -> None:
        """What a rank wrote down before the run was started again. Collective over the world."""
        trainer = self.trainer
        with all_ranks_or_none(trainer.context, "reading what ended the run"):
            mine = self._out_of_memory().take() if trainer.context.is_main else None
        found = all_gather_objects(mine, trainer.context.world_group)[0]
        if found is not None and responder.answer_note(found):
            self.saver.rewind(trainer.step_number)

    def _count_incidents(self, step: int, metrics: dict[str, float]) -> None:
        count_incidents(self.teller, self.trainer.rollouts, step, metrics)

    def close(self) -> None:
        """Ends rewards, the engine and the loggers; safe after an error."""
        self.trainer.collector.scorer.scorer.close()  # the evaluator's is the same
        self.trainer.rollouts.close()
        self.teller.close()

    def _validate(self) -> Mapping[str, float]:
        if self.evaluator is None:
            return {}
        start = time.perf_counter()
        self._enter("validate")
        found = self.evaluator.run(self.trainer.rollouts)
        return {**found, "timing_s/validate": time.perf_counter() - start}

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        metrics = {**metrics, **self.saver.take_metrics()}
        for logger in self.teller.loggers:
            logger.log(step, metrics)
        if step:
            self._tell_samples(step)

    def _tell_samples(self, step: int) -> None:
        num_examine, batch = self.config.reward.num_examine, self.trainer.last_batch
        tell_samples(self.teller, step, batch, self.tokenizer, num_examine=num_examine)

    def save(self, step: int) -> str:
        """A checkpoint of everything, and what became of it in words. Collective over the world."""
        try:
            return self._save_or_raise(step)
        except (SaveError, GuardStop) as error:  # on all ranks; why the run ends must not be lost
            return f"state not saved: {error}"

    def _save_or_raise(self, step: int) -> str:
        """The same, but an error is one. Collective over the world.

        Raises:
            SaveError: see `Saver`.
            GuardStop: weights or moments are not finite.
        """
        if not step:  # Megatron cannot save an optimizer that has made no step
            return "nothing to save before the first step"
        self._enter("save")
        self.saver.save_now(step)
        return "state saved"

    def _save_validated(
        self, step: int, metrics: Mapping[str, float], *, wait: bool = False, must: bool = False
    ) -> None:
        """What is to be saved after a step. Collective over the world.

        Args:
            step: finished.
            metrics: its own, with those of its validation if there was one.
            wait: until it is saved, due or not.
            must: begin a save also where none is due.
        """
        self._enter("save")
        score = val_score(metrics, self.config.reward_model)
        with self.teller.guard_stops(step):
            if wait:
                self.saver.save_now(step, val_score=score)
            else:
                self.saver.after_step(step, val_score=score, must=must)

    def finish_save(self) -> None:
        """Waits for the checkpoint that is being written, if any. Collective over the world."""
        self._enter("save")
        self.saver.finish()

    def small_state(self) -> dict[str, Any]:
        """What a step changes and is not a tensor."""
        return progress(self.trainer)

    def load_small_state(self, state: Mapping[str, Any]) -> None:
        """Takes up what `small_state` gave."""
        load_progress(self.trainer, state)

    def load_checkpoint(self, checkpoint: Path) -> dict[str, Any]:
        """All but what guards have counted and changed. Collective over the world."""
        self._enter("resume")
        saver, seed = self.saver, self.config.trainer.seed
        state = saver.store.load(checkpoint, saver.models, seed=seed)
        self.load_small_state(state)
        saver.note_score(self.trainer.step_number, state.get("val_score"))
        return state

    def rewind(self, step: int) -> None:
        """Forgets what loggers have of steps after this one."""
        self.teller.forget(step + 1)

    def announce(self, kind: str, step: int, text: str, **details: Any) -> None:
        """See `Teller`."""
        self.teller.announce(kind, step, text, **details)

    def _resume(self, checkpoint: Path) -> Mapping[str, float] | None:
        """Takes up a checkpoint's state. Collective over the world.

        Returns:
            The metrics so far of a step that was saved before its validation; else None.
        """
        trainer = self.trainer
        state = self.load_checkpoint(checkpoint)
        if "guard" in state:  # an earlier version wrote none
            trainer.guard.load_state_dict(state["guard"])
            trainer.adjustments = Adjustments.of(state["guard"]["adjustments"])
        self.saver.resumed(trainer.step_number)
        unvalidated: Mapping[str, float] | None = state.get("unvalidated")
        return unvalidated

    def _enter(self, phase: str) -> None:
        self.trainer.on_phase(self.trainer.step_number, phase)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
