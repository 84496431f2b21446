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

from megappo.checkpoint.store import CheckpointStore, model_identity
from megappo.config import Config
from megappo.distributed.grad_sync import Trainable
from megappo.distributed.offload import on_device
from megappo.distributed.parallel import all_ranks_or_none, any_rank
from megappo.errors import StopRequested
from megappo.loggers import Logger
from megappo.models.weights import save_hf
from megappo.rollout.recovery import EnginesLost
from megappo.trainer.evaluate import Evaluator
from megappo.trainer.ppo_trainer import PPOTrainer
from megappo.trainer.records import Records


def export_folder(config: Config) -> Path:
    """Where the trained actor is written as a Hugging Face folder."""
    return Path(config.trainer.run_dir) / "actor_hf"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A built trainer with what surrounds it. Loggers and records are rank 0's alone."""

    config: Config
    trainer: PPOTrainer
    evaluator: Evaluator | None
    store: CheckpointStore
    loggers: Sequence[Logger]
    records: Records | None
    tokenizer: Any
    total_steps: int
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
        """
        trainer = self.trainer
        if checkpoint is not None:
            self._resume(checkpoint)
        trainer.status.enter("push", trainer.step_number)
        pushed = trainer.push_weights()
        self._event("pushed", trainer.step_number, **pushed)
        if checkpoint is None and self.config.trainer.val_before_train:
            self._log(0, {**pushed, **self._validate(), **self._engine_metrics(0)})
        while trainer.step_number < self.total_steps:
            self._step()
            step = trainer.step_number
            is_last = step == self.total_steps
            stopping = any_rank(self.stop_requested(), trainer.context)
            if self._due(step, self.config.trainer.save_freq) or is_last or stopping:
                self._save(step)
            if stopping and not is_last:
                raise StopRequested(f"stopped by a signal after step {step}; state saved")
        if self.config.checkpoint.export_hf:
            self._export()
        trainer.status.enter("done", trainer.step_number)

    def _step(self) -> None:
        """One step and the validation that is due after it, logged. Collective over the world.

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
            self._save(trainer.step_number)
            raise
        self._log(step, metrics | self._engine_metrics(step))
        self._warn(step, metrics)

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

    def _validate(self) -> Mapping[str, float]:
        if self.evaluator is None:
            return {}
        self.trainer.status.enter("validate", self.trainer.step_number)
        start = time.perf_counter()
        found = self.evaluator.run(self.trainer.rollouts)
        return {**found, "timing_s/validate": time.perf_counter() - start}

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        for logger in self.loggers:
            logger.log(step, metrics)
        batch = self.trainer.last_batch
        if self.records is not None and batch is not None and step:
            self.records.write_rollouts(step, batch, self.tokenizer)

    def _warn(self, step: int, metrics: Mapping[str, float]) -> None:
        for text in self.trainer.guard.warnings(metrics):
            self.say(f"warning    step {step}: {text}")
            self._event("warning", step, text=text)

    def _models(self) -> dict[str, Trainable]:
        return {"actor": self.trainer.actor.trainable, "critic": self.trainer.critic.trainable}

    def _save(self, step: int) -> None:
        trainer = self.trainer
        trainer.status.enter("save", step)
        state = {
            "sampler": trainer.sampler.state_dict(),
            "kl_controller": trainer.estimator.kl_controller.state_dict(),
            "config": {
                "model.dtype": self.config.model.dtype,
                "algorithm.kl_ctrl": self.config.algorithm.kl_ctrl,
            },
            "models": {
                "actor": model_identity(trainer.actor.policy.network.spec),
                "critic": model_identity(trainer.critic.network.spec),
            },
        }
        path = self.store.save(step, self._models(), state)
        self._event("saved", step, path=str(path))

    def _resume(self, checkpoint: Path) -> None:
        trainer = self.trainer
        trainer.status.enter("resume", trainer.step_number)
        state = self.store.load(checkpoint, self._models())
        trainer.sampler.load_state_dict(state["sampler"])
        trainer.estimator.kl_controller.load_state_dict(state["kl_controller"])
        trainer.step_number = int(state["step"])
        self._event("resumed", trainer.step_number, path=str(checkpoint))

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
