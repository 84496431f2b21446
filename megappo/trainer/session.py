"""One process's PPO run from checks to teardown, and what the user sees of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import megappo
from megappo.checkpoint import layout as checkpoint_layout
from megappo.checkpoint.compare import flatten
from megappo.checkpoint.store import CheckpointStore
from megappo.config import Config, dump
from megappo.config.load import read
from megappo.distributed.parallel import ParallelContext
from megappo.errors import GuardStop, StopRequested
from megappo.loggers import Logger, LoggerSettings
from megappo.trainer.export import export_folder, exported_step
from megappo.trainer.fit import Run
from megappo.trainer.log_to import contained_loggers
from megappo.trainer.ppo_trainer import PPOTrainer
from megappo.trainer.preflight import Preflight, check_here
from megappo.trainer.process import Process
from megappo.trainer.profiler import StepProfiler, make_profiler
from megappo.trainer.records import Records
from megappo.trainer.run_state import checkpoint_state
from megappo.trainer.saver import Saver
from megappo.trainer.servers import check_servers
from megappo.trainer.status import Status
from megappo.trainer.teller import Teller

ENGINES = {
    "sglang": "SGLang, one engine a rank",
    "megatron": "megatron: the trained weights themselves, one engine a tensor-parallel group",
}
"""How the start of a run names `rollout.engine`."""


class Session:
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
            UserError: from the checks, before a device, a model or an engine is touched.
            GuardStop, StopRequested: see `Run.fit`.
        """
        process = self._process
        config, mistakes = read(config_path, overrides)
        if not mistakes.problems:  # a node with mistakes says so without waiting for the others
            process.meet_nodes(config, wait_s=config.trainer.node_wait_s)
        with process.all_nodes_or_none(wait_s=config.trainer.distributed_timeout_s):
            device, found = check_here(config, process.launch, mistakes)
            self._say_plan(config, found, device)
            finished = self._is_finished(config, found)
            if not finished:
                self._check_servers(config, found, device)
        if finished:
            return
        run_dir = Path(config.trainer.run_dir)
        context = process.join(
            config.parallel,
            device=device,
            run_dir=run_dir,
            seed=config.trainer.seed,
            timeout_s=config.trainer.distributed_timeout_s,
            hang_timeout_s=config.watchdog.timeout_s,
        )
        try:
            self._train(config, found, context, run_dir)
        except (GuardStop, StopRequested):  # all ranks end now, each in its time
            process.watchdog.stop()
            raise
        process.leave(context)

    def _is_finished(self, config: Config, found: Preflight) -> bool:
        """Whether an earlier start has done all there is, which is said."""
        last = exported_step(export_folder(config))
        exported = not config.checkpoint.export_hf or last == found.resumed_step
        if found.resumed_step < found.total_steps or not exported:
            return False
        self._say(
            f"nothing to do: {found.checkpoint} has finished {found.end_in_words}; raise "
            f"trainer.{'total_steps' if config.trainer.total_steps else 'total_epochs'} to go on"
        )
        return True

    def _train(
        self, config: Config, found: Preflight, context: ParallelContext, run_dir: Path
    ) -> None:
        from megappo.trainer.build import build_evaluator, build_trainer

        if context.is_main:
            dump(config, run_dir / "config.yaml")
        started = time.perf_counter()
        log_file = self._process.log_file
        engine_log = log_file.with_name(log_file.name.replace("rank", "engine"))
        trainer = build_trainer(config, found, context, log_file=engine_log)
        records = None
        loggers: list[Logger] = []
        if context.is_main:
            self._say(f"ready      models and engines up in {time.perf_counter() - started:.0f} s")
            records = Records(
                run_dir,
                rollouts_per_step=config.trainer.rollouts_per_step,
                tokens_per_sample=config.trainer.rollout_tokens_per_sample,
                say=self._say,
            )
            loggers = self._make_loggers(config, found, run_dir, records)
        profiler = make_profiler(config.trainer, context, say=self._say, records=records)
        run = Run(
            config=config,
            trainer=trainer,
            evaluator=build_evaluator(config, found, context, trainer.collector.scorer),
            saver=self._make_saver(config, found, trainer, records),
            teller=Teller(say=self._say, loggers=loggers, records=records),
            profiler=profiler,
            tokenizer=found.tokenizer,
            total_steps=found.total_steps,
            changes=found.changes,
            stop_requested=partial(self._process.stop_requested, config.trainer.max_wall_time_s),
            local_world_size=self._process.launch.local_world_size,
            restarts=self._process.launch.restarts,
        )
        status = Status(run_dir if context.is_main else None, say=self._say)
        self._let_watch(trainer, status, profiler)
        try:
            run.fit(found.checkpoint)
        finally:
            run.close()
        self._say(f"done       {found.end_in_words}; results in {run_dir}")

    def _make_saver(
        self, config: Config, found: Preflight, trainer: PPOTrainer, records: Records | None
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
            models=trainer.trainables,
            context=trainer.context,
            ranks_on_node=self._process.launch.local_world_size,
            save_freq=config.trainer.save_freq,
            state=lambda: checkpoint_state(config, trainer, found.train_files, found.base_weights),
            say=self._say,
            event=records.event if records is not None else _no_event,
        )

    def _let_watch(self, trainer: PPOTrainer, status: Status, profiler: StepProfiler) -> None:
        """Phases and forward passes of all models move the watchdog's count."""
        watchdog = self._process.watchdog

        def enter(step: int, phase: str) -> None:
            watchdog.enter(step, phase)
            status.enter(phase, step)
            profiler.watch()

        def pass_begins(module: object, inputs: object) -> None:
            watchdog.move()
            profiler.watch()

        trainer.on_phase = enter
        frozen = [] if trainer.reference is None else [trainer.reference.network]
        if trainer.collector.scorer.model is not None:
            frozen.append(trainer.collector.scorer.model.model.network)
        for network in (*trainer.networks.values(), *frozen):
            for chunk in network.chunks:
                chunk.register_forward_pre_hook(pass_begins)

    def _make_loggers(
        self, config: Config, found: Preflight, run_dir: Path, records: Records
    ) -> list[Logger]:
        first = found.resumed_step + 1 if found.checkpoint is not None else 0
        settings = LoggerSettings(
            run_dir=run_dir,
            first_step=first,
            total_steps=found.total_steps,
            terminal=self._process.screen.out,
            tracking=config.tracking,
            config=flatten(config),
        )

        return contained_loggers(config.loggers, settings, say=self._say, records=records)

    def _say_plan(self, config: Config, found: Preflight, device: str) -> None:
        spec, train = found.actor_spec, found.train_set
        num_val = len(found.val_set) if found.val_set else 0
        self._say(f"megappo {megappo.__version__}  device {device}, {config.model.dtype}")
        self._say(
            f"model      {config.model.path}: {spec.model_type}, {spec.num_layers} layers, hidden "
            f"{spec.hidden_size}, vocabulary {spec.vocab_size}"
        )
        for line in found.plan.lines():
            self._say(line)
        if not config.rollout.url:
            self._say(f"rollout    {ENGINES[config.rollout.engine]}")
        self._say(
            f"data       {len(train)} train rows ({train.num_dropped} dropped), "
            f"{num_val} validation rows; {found.total_steps} steps"
        )
        for warning in found.warnings:
            self._say(f"warning    {warning}")
        if found.checkpoint is not None:
            self._say(f"resuming   from {found.checkpoint}")
            for change in found.changes:
                self._say(f"changed    {change}")
        self._say(f"run folder {config.trainer.run_dir} (what libraries print: logs/)")

    def _check_servers(self, config: Config, found: Preflight, device: str) -> None:
        """Rank 0 asks for all; a rank asks its own again when it starts to use it."""
        if not config.rollout.url or self._process.launch.rank != 0:
            return
        for url in config.rollout.url:
            self._say(f"server     {url}: asking, for up to {config.rollout.server_wait_s:g} s")
        for facts in check_servers(config, found, device=device):
            self._say(f"server     {facts.line()}")


def _no_event(kind: str, step: int, **details: Any) -> None:
    """Events of ranks other than 0: the same ones, which rank 0 writes."""
