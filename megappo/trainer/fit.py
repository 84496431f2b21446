"""The loop around steps: resume, validate, log, save, stop.

What a step's line in metrics.jsonl says is written before its checkpoint, so a run that is killed
in between repeats that step and replaces the line with the same numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megappo.checkpoint.snapshot import Snapshot, has_room
from megappo.config import Config
from megappo.config.guard import PPO_UPDATE_METRICS
from megappo.data.sampler import num_ended
from megappo.distributed.parallel import all_gather_objects, all_ranks_or_none, any_rank
from megappo.errors import GuardStop, RanksDifferError, SaveError, StopRequested
from megappo.loggers import Logger
from megappo.rollout.recovery import EnginesLost
from megappo.trainer.adjustments import Adjustments
from megappo.trainer.evaluate import Evaluator, val_score
from megappo.trainer.examine import examples
from megappo.trainer.export import export_actor
from megappo.trainer.guard import StepAbandoned
from megappo.trainer.out_of_memory import MemoryLost, OutOfMemoryNotes
from megappo.trainer.ppo_trainer import PPOTrainer
from megappo.trainer.profiler import StepProfiler
from megappo.trainer.rank_agreement import compare_roles
from megappo.trainer.records import Records
from megappo.trainer.response import Responder
from megappo.trainer.run_state import load_progress, progress
from megappo.trainer.saver import Saver


class StopHere(RuntimeError):  # noqa: N818, an outcome and not a mistake
    """A step is given up before it has updated anything."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A built trainer with what surrounds it. Loggers and records are rank 0's alone."""

    config: Config
    trainer: PPOTrainer
    evaluator: Evaluator | None
    saver: Saver
    loggers: Sequence[Logger]
    records: Records | None
    profiler: StepProfiler
    tokenizer: Any
    total_steps: int
    changes: Sequence[str]
    """what differs from the run that wrote the checkpoint resumed from"""
    stop_requested: Callable[[], str]
    """Why this rank was asked to stop; empty if it was not."""
    say: Callable[[str], None]
    """Puts a line on the user's screen, from rank 0."""
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
            self._finish_earlier_save()
            raise

    def _finish_earlier_save(self) -> None:
        """Of a step when all was well. Why the run ends matters more than a failure of it."""
        try:
            self.finish_save()
        except SaveError as error:
            self.say(f"warning    {error}")

    def _fit(self, checkpoint: Path | None) -> None:
        trainer = self.trainer
        responder = self._responder()
        if checkpoint is not None:
            self._resume(checkpoint)
            responder.apply_adjustments()
        elif self.restarts:
            self._event("restarted", 0, restarts=self.restarts)
        self._answer_old_out_of_memory(responder)
        responder.keep(trainer.step_number)
        self._enter("sync")
        pushed = trainer.push_weights()
        self._event("pushed", trainer.step_number, **pushed)
        if checkpoint is None and self.config.trainer.val_before_train:
            self._log(0, {**pushed, **self._validate(), **self._engine_metrics(0)})
        while trainer.step_number < self.total_steps:
            metrics = self._step(responder)
            if metrics is None:
                continue
            step = trainer.step_number
            score = val_score(metrics, self.config.reward_model)
            responder.keep(step)
            is_last = step == self.total_steps
            why = self._stop_agreed()
            self._enter("save")
            if is_last or why:
                self.saver.save_now(step, val_score=score)
            else:
                self.saver.after_step(step, val_score=score)
            if why and not is_last:
                raise StopRequested(f"stopped by {why} after step {step}; state saved")
        if self.config.checkpoint.export_hf:
            self._enter("export")
            out = export_actor(self.config, trainer)
            self._event("exported", trainer.step_number, path=str(out))
        self._enter("done")

    def _step(self, responder: Responder) -> Mapping[str, float] | None:
        """One step and the validation that is due after it, logged; None if it was taken back.

        Collective over the world. Returns the step's metrics.

        Raises:
            GuardStop: a guard ended the run.
            StopRequested: see `fit`; the step was given up before it updated anything.
            EnginesLost: an engine failed too often; the state is saved. A step that was not applied
                is not counted, and a resumed run draws its prompts again.
        """
        trainer = self.trainer
        sampler, ended_before = trainer.sampler.state_dict(), num_ended(trainer.sampler)
        metrics: dict[str, float] = {}
        given_up: StepAbandoned | MemoryLost | None = None
        try:
            with self.profiler.recording(trainer.step_number + 1):
                metrics |= trainer.step(may_stop=self._stop_here)
                if trainer.step_number in self.profiler.steps:
                    self._enter("profile")
            step = trainer.step_number
            every = self.config.trainer.test_freq
            if self._due(step, every) or (step == self.total_steps and every > 0):
                metrics |= self._validate()
        except (StepAbandoned, MemoryLost) as caught:
            # Without what it holds of the pass that failed: going back needs the memory.
            given_up = caught.with_traceback(None)
            given_up.__context__ = None
        except StopHere as stop:
            trainer.sampler.load_state_dict(sampler)
            step = trainer.step_number
            raise StopRequested(f"stopped by {stop} after step {step}; {self.save(step)}") from stop
        except (GuardStop, torch.OutOfMemoryError) as error:
            self._note_end(error)
            raise
        except EnginesLost:
            if metrics:
                self._log(step, metrics | self._engine_metrics(step))
            else:
                trainer.sampler.load_state_dict(sampler)
                self._engine_metrics(trainer.step_number + 1)
            self.say(f"engines    {self.save(trainer.step_number)}")
            raise
        if given_up is not None:
            self._engine_metrics(trainer.step_number + 1)
            self._take_back(given_up, responder)
            return None
        metrics |= self._engine_metrics(step)
        metrics["guard/actions"] = float(trainer.guard.num_actions)
        problem = None
        if not self.config.parallel.fsdp and self._due(step, self.config.guard.check_ranks_every):
            problem = compare_roles(trainer, metrics)
        self._log(step, metrics)
        self._warn(step, metrics)
        if problem is not None:
            self._event("ranks_differ", step, text=str(problem))
            raise problem
        if responder.respond(trainer.guard.after_step(step, metrics)):
            return None
        self._note_epochs(step, ended_before)
        return metrics

    def _take_back(self, given_up: StepAbandoned | MemoryLost, responder: Responder) -> None:
        """From a step that was not finished to an earlier state. Collective over the world."""
        if isinstance(given_up, StepAbandoned):
            responder.roll_back(given_up.decision)
            return
        guard, step = self.trainer.guard, self.trainer.step_number + 1
        decision = guard.out_of_memory(step, str(given_up))
        if decision is None:
            raise given_up
        responder.free_memory(decision)

    def _note_end(self, error: GuardStop | torch.OutOfMemoryError) -> None:
        """What events or the next start should know of a step that ends the run."""
        step = self.trainer.step_number + 1
        if isinstance(error, GuardStop):
            self._event("guard", step, action="stop", reason=str(error))
        else:
            self._out_of_memory().note(self.trainer.adjustments, step, str(error))

    def _stop_agreed(self) -> str:
        """Why the run is to stop, if any rank was asked to. Collective over the world."""
        context, mine = self.trainer.context, self.stop_requested()
        if not any_rank(bool(mine), context):
            return ""
        reasons: list[str] = all_gather_objects(mine, context.world_group)
        return next(filter(None, reasons))

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
        if found is None:
            return
        decision = trainer.guard.out_of_memory(found["step"], found["text"])
        if decision is not None:
            trainer.adjustments.halvings = max(trainer.adjustments.halvings, found["halvings"])
            trainer.adjustments.offloads_all |= found["offloads_all"]
            responder.apply_adjustments()
            responder.carry_out(decision)
            self.saver.rewind(trainer.step_number)

    def _responder(self) -> Responder:
        """Collective over the world."""
        trainer, models = self.trainer, self.saver.models
        wanted = self.config.guard.snapshot_every > 0
        fits = wanted and has_room(models, trainer.context, local_world_size=self.local_world_size)
        if wanted and not fits:
            self.announce(
                "warning",
                trainer.step_number,
                "no room in host memory for a snapshot of the training state (or parallel.fsdp): "
                "a guard's roll_back goes back to the latest checkpoint",
            )
        config = self.config
        return Responder(
            trainer,
            self,
            saver=self.saver,
            snapshot=Snapshot(models=models) if fits else None,
            longest_sample=config.data.max_prompt_length + config.rollout.max_response_length,
        )

    def _engine_metrics(self, step: int) -> dict[str, float]:
        """What happened to engines since the last call, over all ranks; restarts become events."""
        incidents = self.trainer.rollouts.engine.take_incidents()
        for restart in incidents.restarts:
            self._event("engine_restarted", step, rank=restart.rank, reason=restart.reason)
        return {
            "rollout/engine_restarts": float(len(incidents.restarts)),
            "rollout/aborted": float(incidents.num_aborted),
        }

    def close(self) -> None:
        """Ends rewards, the engine and the loggers; safe after an error."""
        self.trainer.collector.scorer.scorer.close()  # the evaluator's is the same
        self.trainer.rollouts.close()
        for logger in self.loggers:
            logger.close()

    def _due(self, step: int, every: int) -> bool:
        return every > 0 and step % every == 0

    def _note_epochs(self, step: int, ended_before: int) -> None:
        """Says that the data ended, where it did; another epoch, if any, draws them anew.

        A step of several batches (dynamic sampling) may end one before its last, or several.
        """
        sampler = self.trainer.sampler
        rows = sampler.batches_per_epoch * sampler.batch_size
        for epoch in range(ended_before + 1, num_ended(sampler) + 1):
            text = f"epoch {epoch} is over after step {step}: {sampler.epoch_in_words()}"
            self.say(f"data       {text}")
            self._event("epoch_over", step, epoch=epoch, rows=rows)

    def _validate(self) -> Mapping[str, float]:
        if self.evaluator is None:
            return {}
        start = time.perf_counter()
        self._enter("validate")
        found = self.evaluator.run(self.trainer.rollouts)
        return {**found, "timing_s/validate": time.perf_counter() - start}

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        metrics = {**metrics, **self.saver.take_metrics()}
        for logger in self.loggers:
            logger.log(step, metrics)
        batch = self.trainer.last_batch
        if self.records is not None and batch is not None and step:
            self.records.write_rollouts(step, batch, self.tokenizer)
            for text in examples(batch, self.tokenizer, self.config.reward.num_examine):
                self.say(text)

    def _warn(self, step: int, metrics: Mapping[str, float]) -> None:
        guard = self.trainer.guard
        texts = guard.warnings(metrics)
        if step == 1:
            texts += guard.unknown_metrics(metrics, of_updates=PPO_UPDATE_METRICS)
        for text in texts:
            self.announce("warning", step, text)

    def save(self, step: int) -> str:
        """A checkpoint of everything, and what became of it in words. Collective over the world."""
        if not step:  # Megatron cannot save an optimizer that has made no step
            return "nothing to save before the first step"
        self._enter("save")
        try:
            self.saver.save_now(step)
        except SaveError as error:  # on all ranks; the reason to stop must not be lost over it
            return f"state not saved: {error}"
        return "state saved"

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
        for logger in self.loggers:
            logger.rewind(step + 1)

    def announce(self, kind: str, step: int, text: str, **details: Any) -> None:
        """An event, a line on the screen, and a text for loggers that have a place for it."""
        self.say(f"{kind:<10} step {step}: {text}")
        self._event(kind, step, **(details or {"text": text}))
        for logger in self.loggers:
            logger.note(step, f"{kind}: {text}")

    def _resume(self, checkpoint: Path) -> None:
        trainer = self.trainer
        state = self.load_checkpoint(checkpoint)
        if "guard" in state:  # an earlier version wrote none
            trainer.guard.load_state_dict(state["guard"])
            trainer.adjustments = Adjustments.of(state["guard"]["adjustments"])
        step = trainer.step_number
        self.saver.resumed(step)
        self._event(
            "resumed",
            step,
            path=str(checkpoint),
            changes=list(self.changes),
            restarts=self.restarts,
        )

    def _enter(self, phase: str) -> None:
        self.trainer.on_phase(self.trainer.step_number, phase)

    def _event(self, kind: str, step: int, **details: Any) -> None:
        if self.records is not None:
            self.records.event(kind, step, **details)
