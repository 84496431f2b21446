"""The loop around steps on given answers: resume, validate, log, save, stop, export.

A run that is to stop does not validate first: the checkpoint keeps what is known of the step, and
the resumed run ends it. Left out of what PPO's loop does: going back to an earlier state. A step
here depends on nothing but weights and rows, so a run that went wrong is started again from a
checkpoint with other settings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megappo.checkpoint.compare import flatten, model_identity
from megappo.config import SupervisedConfig
from megappo.config.guard import UPDATE_METRICS_OF
from megappo.distributed.rank_check import compare_ranks
from megappo.errors import GuardStop, RanksDifferError, SaveError, StopRequested
from megappo.models.hf_export import save_hf
from megappo.trainer.export import exported_step, exporting
from megappo.trainer.guard import Decision, StepAbandoned
from megappo.trainer.profiler import StepProfiler
from megappo.trainer.saver import Saver
from megappo.trainer.stopping import stop_agreed
from megappo.trainer.supervised.trainer import SupervisedTrainer
from megappo.trainer.teller import Teller


def export_folder(config: SupervisedConfig) -> Path:
    """Where the trained model is written as a Hugging Face folder: `rm_hf` or `sft_hf`."""
    return Path(config.trainer.run_dir) / f"{config.task}_hf"


def is_finished(config: SupervisedConfig, *, resumed_step: int, total_steps: int) -> bool:
    """Whether an earlier start has done all there is, the export of that very step included."""
    last = exported_step(export_folder(config))
    exported = not config.checkpoint.export_hf or last == resumed_step
    return resumed_step >= total_steps and exported


@dataclass(frozen=True, kw_only=True)
class SupervisedRun:
    """A built trainer with what surrounds it."""

    config: SupervisedConfig
    trainer: SupervisedTrainer
    saver: Saver
    teller: Teller
    profiler: StepProfiler
    total_steps: int
    changes: Sequence[str]
    """what differs from the run that wrote the checkpoint resumed from"""
    stop_requested: Callable[[], str]
    """Why this rank was asked to stop; empty if it was not."""
    restarts: int
    """by torchrun or Slurm, for the events"""

    def fit(self, checkpoint: Path | None) -> None:
        """Trains to the end. Collective over the world.

        Raises:
            StopRequested: a signal came, or the time is over; the state is saved.
            GuardStop: a guard ended the run.
            RanksDifferError: ranks do not hold the same weights; the step is not saved.
            SaveError: see `Saver`.
        """
        try:
            self._fit(checkpoint)
        except (GuardStop, RanksDifferError):
            self.saver.finish_earlier()
            raise

    def close(self) -> None:
        """Ends the loggers; safe after an error."""
        self.teller.close()

    def _fit(self, checkpoint: Path | None) -> None:
        trainer, settings = self.trainer, self.config.trainer
        unvalidated = None if checkpoint is None else self._resume(checkpoint)
        self.teller.tell_start(
            trainer.step_number, checkpoint, changes=self.changes, restarts=self.restarts
        )
        if checkpoint is None and settings.val_before_train:
            self._log(0, trainer.validate())
        if unvalidated is not None:
            self._make_up(unvalidated)
        while trainer.step_number < self.total_steps:
            metrics = self._step()
            step = trainer.step_number
            is_last = step == self.total_steps
            why = self._stop_agreed()
            trainer.on_phase(step, "save")
            with self.teller.guard_stops(step):
                if is_last or why:
                    self.saver.save_now(step, val_score=_val_score(metrics))
                else:
                    self.saver.after_step(step, val_score=_val_score(metrics))
            if why and not is_last:
                raise StopRequested(f"stopped by {why} after step {step}; state saved")
        if self.config.checkpoint.export_hf:
            self._export()
        trainer.on_phase(trainer.step_number, "done")

    def _make_up(self, row: Mapping[str, float]) -> None:
        """Ends the step that was saved before its validation, with the metrics `row` until then.

        Collective over the world.
        """
        step = self.trainer.step_number
        self.teller.forget(step)
        self.saver.rewind(step)
        metrics = self._end_step(dict(row))
        self.trainer.on_phase(step, "save")
        with self.teller.guard_stops(step):
            self.saver.after_step(step, val_score=_val_score(metrics), must=True)

    def _step(self) -> Mapping[str, float]:
        """One step and the validation that is due after it, logged. Collective over the world.

        Raises:
            StopRequested: see `fit`; the step is done but for its validation.
            SaveError: the state could not be saved then.
        """
        trainer = self.trainer
        sampler = trainer.sampler.state_dict()
        try:
            with self.profiler.recording(trainer.step_number + 1):
                metrics = dict(trainer.step())
                if trainer.step_number in self.profiler.steps:
                    trainer.on_phase(trainer.step_number, "profile")
        except StepAbandoned as abandoned:
            trainer.sampler.load_state_dict(sampler)  # a resumed run draws this step's rows again
            self._stop(abandoned.decision)
        return self._end_step(metrics)

    def _end_step(self, metrics: dict[str, float]) -> Mapping[str, float]:
        """Compares ranks, validates, logs and asks the guard, after a step's update.

        Collective over the world. Returns the metrics.
        """
        trainer, step, every = self.trainer, self.trainer.step_number, self.config.trainer.test_freq
        metrics["guard/actions"] = float(trainer.guard.num_actions)
        problem = self._compare_ranks(step, metrics)
        is_last = step == self.total_steps
        if problem is None and every and (step % every == 0 or is_last):
            # What the update asked for must be answered before the step is saved.
            if not is_last and not trainer.guard.decided and (why := self._stop_agreed()):
                self._stop_unvalidated(step, metrics, why)
            metrics |= trainer.validate()
        self._log(step, metrics)
        if step == 1:
            of_updates = UPDATE_METRICS_OF[self.config.task]
            for text in trainer.guard.unknown_metrics(metrics, of_updates=of_updates):
                self.teller.announce("warning", step, text)
        if problem is not None:
            self.teller.event("ranks_differ", step, text=str(problem))
            raise problem
        for decision in trainer.guard.after_step(step, metrics):
            self._answer(decision)
        return metrics

    def _stop_unvalidated(self, step: int, metrics: Mapping[str, float], why: str) -> NoReturn:
        """Saves a step that the resumed run will validate and log. Collective over the world."""
        self.saver.note_unvalidated(step, metrics)
        self.trainer.on_phase(step, "save")
        with self.teller.guard_stops(step):
            self.saver.save_now(step)
        raise StopRequested(
            f"stopped by {why} after step {step}, before its validation; state saved"
        )

    def _answer(self, decision: Decision) -> None:
        """Says what a rule found and did, and counts it.

        Raises:
            GuardStop: it wants to stop, or actions are used up; the state is saved.
        """
        guard = self.trainer.guard
        text = "; ".join(filter(None, (f"{decision.action}: {decision.reason}", decision.detail)))
        if decision.action != "warn":
            if decision.action == "save_and_stop" or (
                guard.num_actions >= guard.settings.max_actions
            ):
                self._stop(decision)
            guard.num_actions += 1
        self.teller.announce("guard", decision.step, text)

    def _stop(self, decision: Decision) -> NoReturn:
        step = self.trainer.step_number
        saved = "nothing to save before the first step"
        if step:
            try:
                self.saver.save_now(step)
                saved = "state saved"
            except (SaveError, GuardStop) as error:  # on all ranks; why must not be lost
                saved = f"state not saved: {error}"
        text = f"{decision.reason}; stopped after step {step}, {saved}"
        self.teller.announce("guard", decision.step, text)
        raise GuardStop(f"step {decision.step}: {text}")

    def _stop_agreed(self) -> str:
        """Why the run is to stop, if any rank was asked to. Collective over the world."""
        return stop_agreed(self.stop_requested(), self.trainer.context)

    def _compare_ranks(self, step: int, metrics: dict[str, float]) -> RanksDifferError | None:
        """Looks, where due, whether ranks hold the same weights. Collective over the world."""
        every = self.config.guard.check_ranks_every
        if self.config.parallel.fsdp or not every or step % every:
            return None
        start = time.perf_counter()
        model = self.trainer.learner.trainable
        try:
            compared = compare_ranks(model.name, model.chunks, self.trainer.context)
        except RanksDifferError as error:
            return error
        metrics["training/compared_tensors"] = float(compared)
        metrics["timing_s/compare_ranks"] = time.perf_counter() - start
        return None

    def _resume(self, checkpoint: Path) -> Mapping[str, float] | None:
        """Takes up a checkpoint's state. Collective over the world.

        Returns:
            The metrics so far of a step that was saved before its validation; else None.
        """
        trainer = self.trainer
        trainer.on_phase(trainer.step_number, "resume")
        state = self.saver.store.load(checkpoint, self.saver.models, seed=self.config.trainer.seed)
        trainer.sampler.load_state_dict(state["sampler"])
        trainer.guard.load_state_dict(state["guard"])
        trainer.step_number = int(state["step"])
        self.saver.resumed(trainer.step_number)
        unvalidated: Mapping[str, float] | None = state.get("unvalidated")
        return unvalidated

    def _export(self) -> None:
        trainer = self.trainer
        trainer.on_phase(trainer.step_number, "export")
        learner, context = trainer.learner, trainer.context
        out = export_folder(self.config)
        with exporting(out, step=trainer.step_number, context=context) as new:
            save_hf(
                learner.trainable.chunks,
                learner.network.spec,
                self.config.model.path,
                new,
                head=learner.objective.head,
            )
        self.teller.event("exported", trainer.step_number, path=str(out))

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        metrics = {**metrics, **self.saver.take_metrics()}
        for logger in self.teller.loggers:
            logger.log(step, metrics)


def checkpoint_state(
    config: SupervisedConfig,
    trainer: SupervisedTrainer,
    train_files: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The small state of a checkpoint, equal on all ranks, as JSON values."""
    return {
        "sampler": trainer.sampler.state_dict(),
        "guard": trainer.guard.state_dict(),
        "config": flatten(config),
        "train_files": list(train_files),
        "models": {config.task: model_identity(trainer.learner.network.spec)},
    }


def _val_score(metrics: Mapping[str, float]) -> float | None:
    """What `checkpoint.keep_best` keeps the highest of: accuracy, or without one -loss."""
    if "val/loss" not in metrics:
        return None
    return metrics.get("val/accuracy", -metrics["val/loss"])
