"""The loop around steps: resume, validate, log, save, stop.

What a step's line in metrics.jsonl says is written before its checkpoint, so a run that is killed
in between repeats that step and replaces the line with the same numbers.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.checkpoint.compare import flatten, model_identity
from megappo.config import Config
from megappo.distributed.grad_sync import NonFiniteGradientError
from megappo.distributed.offload import on_device
from megappo.distributed.parallel import all_ranks_or_none, any_rank
from megappo.distributed.rank_check import compare_ranks
from megappo.errors import GuardStop, RanksDifferError, StopRequested
from megappo.loggers import Logger
from megappo.models.weights import save_hf
from megappo.rollout.recovery import EnginesLost
from megappo.trainer.evaluate import Evaluator
from megappo.trainer.ppo_trainer import PPOTrainer
from megappo.trainer.records import Records
from megappo.trainer.saver import Saver


def export_folder(config: Config) -> Path:
    """Where the trained actor is written as a Hugging Face folder."""
    return Path(config.trainer.run_dir) / "actor_hf"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A built trainer with what surrounds it. Loggers and records are rank 0's alone."""

    config: Config
    trainer: PPOTrainer
    evaluator: Evaluator | None
    saver: Saver
    loggers: Sequence[Logger]
    records: Records | None
    tokenizer: Any
    total_steps: int
    changes: Sequence[str]
    """what is other than when the checkpoint that is resumed was written"""
    stop_requested: Callable[[], bool]
    say: Callable[[str], None]
    """Puts a line on the user's screen, from rank 0."""

    def fit(self, checkpoint: Path | None) -> None:
        """Trains to the end. Collective over the world.

        Raises:
            StopRequested: a signal came; the state is saved.
            GuardStop: a guard ended the run.
            EnginesLost: an engine failed more often than `rollout.max_restarts` allows; the state
                is saved, if a step was begun.
            RanksDifferError: ranks do not hold the same weights; the step is not saved.
            SaveError: see `Saver`.
        """
        try:
            self._fit(checkpoint)
        except (GuardStop, NonFiniteGradientError, RanksDifferError):
            self.saver.finish()  # of an earlier step, when all was well
            raise

    def _fit(self, checkpoint: Path | None) -> None:
        trainer = self.trainer
        if checkpoint is not None:
            self._resume(checkpoint)
        trainer.status.enter("push", trainer.step_number)
        pushed = trainer.push_weights()
        self._event("pushed", trainer.step_number, **pushed)
        if checkpoint is None and self.config.trainer.val_before_train:
            self._log(0, {**pushed, **self._validate(), **self._engine_metrics(0)})
        while trainer.step_number < self.total_steps:
            score = self._step().get("val/score/mean")
            step = trainer.step_number
            self._note_epoch(step)
            is_last = step == self.total_steps
            trainer.status.enter("save", step)
            stopping = any_rank(self.stop_requested(), trainer.context)
            if is_last or stopping:
                self.saver.save_now(step, val_score=score)
            else:
                self.saver.after_step(step, val_score=score)
            if stopping and not is_last:
                raise StopRequested(f"stopped by a signal after step {step}; state saved")
        if self.config.checkpoint.export_hf:
            self._export()
        trainer.status.enter("done", trainer.step_number)

    def _step(self) -> Mapping[str, float]:
        """One step and the validation that is due after it, logged. Collective over the world.

        Returns its metrics.

        Raises:
            EnginesLost: an engine failed too often; the state is saved. A step that was not applied
                is not counted, and a resumed run draws its prompts again.
        """
        trainer = self.trainer
        sampler = trainer.sampler.state_dict()
        metrics: dict[str, float] = {}
        try:
            metrics |= trainer.step()
            step = trainer.step_number
            every = self.config.trainer.test_freq
            if self._due(step, every) or (step == self.total_steps and every > 0):
                metrics |= self._validate()
        except EnginesLost:
            if metrics:
                self._log(step, metrics | self._engine_metrics(step))
            else:
                trainer.sampler.load_state_dict(sampler)
                self._engine_metrics(trainer.step_number + 1)
            trainer.status.enter("save", trainer.step_number)
            self.saver.save_now(trainer.step_number)
            raise
        problem = self._compare_ranks(step, metrics)
        self.saver.publish()
        self._log(step, metrics | self._engine_metrics(step))
        self._warn(step, metrics)
        if problem is not None:
            self._event("ranks_differ", step, text=str(problem))
            raise problem
        return metrics

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
        """Ends the engine and the loggers; safe after an error."""
        self.trainer.rollouts.close()
        for logger in self.loggers:
            logger.close()

    def _due(self, step: int, every: int) -> bool:
        return every > 0 and step % every == 0

    def _note_epoch(self, step: int) -> None:
        """Says that the data ended, where it did; another epoch, if any, draws them anew."""
        sampler = self.trainer.sampler
        if not sampler.is_at_end:
            return
        rows = sampler.batches_per_epoch * sampler.batch_size
        text = (
            f"epoch {sampler.epoch + 1} is over after step {step}: {rows} rows drawn, "
            f"{sampler.num_rows - rows} left out as no full batch"
        )
        self.say(f"data       {text}")
        self._event("epoch_over", step, epoch=sampler.epoch + 1, rows=rows)

    def _validate(self) -> Mapping[str, float]:
        if self.evaluator is None:
            return {}
        self.trainer.status.enter("validate", self.trainer.step_number)
        start = time.perf_counter()
        found = self.evaluator.run(self.trainer.rollouts)
        return {**found, "timing_s/validate": time.perf_counter() - start}

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        metrics = {**metrics, **self.saver.take_metrics()}
        for logger in self.loggers:
            logger.log(step, metrics)
        batch = self.trainer.last_batch
        if self.records is not None and batch is not None and step:
            self.records.write_rollouts(step, batch, self.tokenizer)

    def _warn(self, step: int, metrics: Mapping[str, float]) -> None:
        for text in self.trainer.guard.warnings(metrics):
            self.say(f"warning    step {step}: {text}")
            self._event("warning", step, text=text)

    def _compare_ranks(self, step: int, metrics: dict[str, float]) -> RanksDifferError | None:
        """Looks, where it is due, whether ranks hold the same weights. Collective over the world.

        A difference is returned, to be raised after the step is logged.
        """
        if self.config.parallel.fsdp or not self._due(step, self.config.guard.check_ranks_every):
            return None
        start = time.perf_counter()
        compared = 0
        for role in (self.trainer.actor, self.trainer.critic):
            model = role.trainable
            with on_device(model.memory, "params"):
                try:
                    compared += compare_ranks(model.name, model.chunks, self.trainer.context)
                except RanksDifferError as error:
                    return error
        metrics["training/compared_tensors"] = float(compared)
        metrics["timing_s/compare_ranks"] = time.perf_counter() - start
        return None

    def _resume(self, checkpoint: Path) -> None:
        trainer, saver = self.trainer, self.saver
        trainer.status.enter("resume", trainer.step_number)
        seed = self.config.trainer.seed
        state = saver.store.load(checkpoint, saver.models, seed=seed)
        trainer.sampler.load_state_dict(state["sampler"])
        trainer.estimator.kl_controller.load_state_dict(state["kl_controller"])
        trainer.step_number = int(state["step"])
        saver.saved_step = trainer.step_number
        changes = list(self.changes)
        self._event("resumed", trainer.step_number, path=str(checkpoint), changes=changes)

    def _export(self) -> None:
        network = self.trainer.actor.policy.network
        context = self.trainer.context
        self.trainer.status.enter("export", self.trainer.step_number)
        out = export_folder(self.config)
        new = out.with_name("actor_hf.new")
        with all_ranks_or_none(context, "clearing an old export"):
            if context.is_main and new.exists():
                shutil.rmtree(new)
        trainable = self.trainer.actor.trainable
        with on_device(trainable.memory, "params"):
            save_hf(trainable.chunks, network.spec, self.config.model.path, new)
        with all_ranks_or_none(context, "exporting the actor"):
            if context.is_main:
                if out.exists():
                    shutil.rmtree(out)
                new.rename(out)
        self._event("exported", self.trainer.step_number, path=str(out))

    def _event(self, kind: str, step: int, **details: Any) -> None:
        if self.records is not None:
            self.records.event(kind, step, **details)


def checkpoint_state(
    config: Config, trainer: PPOTrainer, train_files: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The small state of a checkpoint, equal on all ranks, as JSON values.

    Args:
        config: of the run.
        trainer: between two steps.
        train_files: of `file_identities`.
    """
    return {
        "sampler": trainer.sampler.state_dict(),
        "kl_controller": trainer.estimator.kl_controller.state_dict(),
        "config": flatten(config),
        "train_files": list(train_files),
        "models": {
            "actor": model_identity(trainer.actor.policy.network.spec),
            "critic": model_identity(trainer.critic.network.spec),
        },
    }
