"""One process's run on given answers, from checks to teardown, and what the user sees of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import megappo
from megappo.checkpoint import layout as checkpoint_layout
from megappo.checkpoint.compare import device_changes, flatten
from megappo.checkpoint.store import CheckpointStore
from megappo.config import SupervisedConfig, dump
from megappo.config.checks import check_cpu_features
from megappo.config.findings import Findings
from megappo.config.load import read_any
from megappo.distributed import parallel
from megappo.distributed.parallel import ParallelContext, all_gather_objects
from megappo.errors import GuardStop, StopRequested
from megappo.loggers import Logger, LoggerSettings
from megappo.trainer.log_to import contained_loggers
from megappo.trainer.process import Process
from megappo.trainer.profiler import StepProfiler, make_profiler
from megappo.trainer.records import Records
from megappo.trainer.saver import Saver
from megappo.trainer.status import Status
from megappo.trainer.supervised.fit import SupervisedRun, checkpoint_state, is_finished
from megappo.trainer.supervised.preflight import (
    Course,
    SupervisedPreflight,
    scan_rows,
    supervised_preflight,
)
from megappo.trainer.supervised.trainer import SupervisedTrainer
from megappo.trainer.teller import Teller


class SupervisedSession:
    """Checks, starts, trains and ends.

    Args:
        process: started.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._say = process.say

    def run(self, config_path: str, overrides: Sequence[str]) -> None:
        """The whole run. Collective over the world after the checks.

        Raises:
            UserError: from the checks; all but those of rows before a device is touched, and those
                before a model is built.
            GuardStop, StopRequested: see `SupervisedRun.fit`.
        """
        process = self._process
        config, mistakes = read_any(config_path, overrides)
        assert isinstance(config, SupervisedConfig)
        if not mistakes.problems:  # a node with mistakes says so without waiting for the others
            process.meet_nodes(config, wait_s=config.trainer.node_wait_s)
        with process.all_nodes_or_none(wait_s=config.trainer.distributed_timeout_s):
            device, found = self._check_here(config, mistakes)
            self._say_plan(config, found, device)
        context = self._process.join(
            config.parallel,
            device=device,
            run_dir=Path(config.trainer.run_dir),
            seed=config.trainer.seed,
            timeout_s=config.trainer.distributed_timeout_s,
            hang_timeout_s=config.watchdog.timeout_s,
        )
        try:
            self._train(config, found, context)
        except (GuardStop, StopRequested):  # all ranks end now, each in its time
            self._process.watchdog.stop()
            raise
        self._process.leave(context)

    def _check_here(
        self, config: SupervisedConfig, mistakes: Findings
    ) -> tuple[str, SupervisedPreflight]:
        """Device of a run that starts on this machine, and what the checks find. No other rank.

        Raises:
            UserError: everything that is wrong.
        """
        launch = self._process.launch
        resolve = partial(parallel.resolve_device, config.device)
        device = mistakes.attempt(resolve, needs=("device",))
        if device is not None:
            if device == "cpu":
                mistakes.add(*check_cpu_features(config.model, config.parallel))
            mistakes.attempt(partial(parallel.check_device, device, launch))
        found = supervised_preflight(config, launch.world_size, found=mistakes)
        assert device is not None
        if found.state is None:
            return device, found
        return device, replace(
            found, changes=(*device_changes(found.state, device), *found.changes)
        )

    def _train(
        self, config: SupervisedConfig, found: SupervisedPreflight, context: ParallelContext
    ) -> None:
        from megappo.trainer.supervised.build import build_supervised

        course = scan_rows(
            config,
            found,
            rank=context.rank,
            world_size=context.world_size,
            gather=lambda scan: all_gather_objects(scan, context.world_group),
        )
        self._say_rows(found, course)
        if is_finished(config, resumed_step=found.resumed_step, total_steps=course.total_steps):
            self._say(
                f"nothing to do: {found.checkpoint} has finished {course.total_steps} steps; raise "
                f"trainer.{'total_steps' if config.trainer.total_steps else 'total_epochs'} to "
                "go on"
            )
            return
        run_dir = Path(config.trainer.run_dir)
        if context.is_main:
            dump(config, run_dir / "config.yaml")
        started = time.perf_counter()
        trainer = build_supervised(config, found, course, context)
        self._say(f"ready      model up in {time.perf_counter() - started:.0f} s")
        records = None
        loggers: list[Logger] = []
        if context.is_main:
            records = Records(run_dir, rollouts_per_step=0, tokens_per_sample=0, say=self._say)
            loggers = self._make_loggers(config, found, course, records)
        profiler = make_profiler(config.trainer, context, say=self._say, records=records)
        run = SupervisedRun(
            config=config,
            trainer=trainer,
            saver=self._make_saver(config, found, trainer, records),
            teller=Teller(say=self._say, loggers=loggers, records=records),
            profiler=profiler,
            total_steps=course.total_steps,
            changes=found.changes,
            stop_requested=partial(self._process.stop_requested, config.trainer.max_wall_time_s),
            restarts=self._process.launch.restarts,
        )
        status = Status(run_dir if context.is_main else None, say=self._say)
        self._let_watch(trainer, status, profiler)
        try:
            run.fit(found.checkpoint)
        finally:
            run.close()
        self._say(f"done       {course.total_steps} steps; results in {run_dir}")

    def _make_saver(
        self,
        config: SupervisedConfig,
        found: SupervisedPreflight,
        trainer: SupervisedTrainer,
        records: Records | None,
    ) -> Saver:
        settings = config.checkpoint
        return Saver(
            store=CheckpointStore(
                folder=checkpoint_layout.folder_of(Path(config.trainer.run_dir)),
                policy=checkpoint_layout.KeepPolicy(
                    newest=settings.keep, every=settings.keep_every, best=settings.keep_best
                ),
                context=trainer.context,
            ),
            settings=settings,
            models={config.task: trainer.learner.trainable},
            context=trainer.context,
            ranks_on_node=self._process.launch.local_world_size,
            save_freq=config.trainer.save_freq,
            state=lambda: checkpoint_state(config, trainer, found.train_files),
            say=self._say,
            event=records.event if records is not None else _no_event,
        )

    def _make_loggers(
        self,
        config: SupervisedConfig,
        found: SupervisedPreflight,
        course: Course,
        records: Records,
    ) -> list[Logger]:
        first = found.resumed_step + 1 if found.checkpoint is not None else 0
        settings = LoggerSettings(
            run_dir=Path(config.trainer.run_dir),
            first_step=first,
            total_steps=course.total_steps,
            terminal=self._process.screen.out,
            tracking=config.tracking,
            config=flatten(config),
        )
        return contained_loggers(config.loggers, settings, say=self._say, records=records)

    def _let_watch(
        self, trainer: SupervisedTrainer, status: Status, profiler: StepProfiler
    ) -> None:
        """Phases and forward passes move the watchdog's count."""
        watchdog = self._process.watchdog

        def enter(step: int, phase: str) -> None:
            watchdog.enter(step, phase)
            status.enter(phase, step)
            profiler.watch()

        def pass_begins(module: object, inputs: object) -> None:
            watchdog.move()
            profiler.watch()

        trainer.on_phase = enter
        for chunk in trainer.learner.network.chunks:
            chunk.register_forward_pre_hook(pass_begins)

    def _say_plan(self, config: SupervisedConfig, found: SupervisedPreflight, device: str) -> None:
        spec = found.spec
        self._say(
            f"megappo {megappo.__version__}  {config.task}  device {device}, {config.model.dtype}"
        )
        self._say(
            f"model      {config.model.path}: {spec.model_type}, {spec.num_layers} layers, hidden "
            f"{spec.hidden_size}, vocabulary {spec.vocab_size}"
        )
        for line in found.plan.lines():
            self._say(line)
        if found.checkpoint is not None:
            self._say(f"resuming   from {found.checkpoint}")
            for change in found.changes:
                self._say(f"changed    {change}")
        self._say(f"run folder {config.trainer.run_dir} (what libraries print: logs/)")

    def _say_rows(self, found: SupervisedPreflight, course: Course) -> None:
        for rows in (found.train_set, found.val_set):
            if rows is not None:
                self._say(f"data       {rows.in_words}")
        self._say(f"steps      {course.total_steps}")


def _no_event(kind: str, step: int, **details: Any) -> None:
    """Events of ranks other than 0: the same ones, which rank 0 writes."""
