"""One process's run from command line to teardown, and what the user sees of it."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import megappo
from megappo.checkpoint import layout as checkpoint_layout
from megappo.checkpoint.compare import flatten
from megappo.checkpoint.store import CheckpointStore
from megappo.config import Config, dump
from megappo.config.load import read
from megappo.distributed import parallel
from megappo.distributed.environment import (
    LaunchEnvironment,
    check_slurm_nodes,
)
from megappo.distributed.node_agreement import NodeAgreement
from megappo.distributed.node_facts import gather_facts
from megappo.distributed.node_network import choose_gloo_interface
from megappo.distributed.parallel import Degrees, ParallelContext
from megappo.distributed.watchdog import HangReport, Watchdog
from megappo.errors import GuardStop, StopRequested, UserError
from megappo.loggers import LOGGERS, Logger, LoggerSettings
from megappo.loggers.contained import ContainedLogger
from megappo.trainer.export import exported_step
from megappo.trainer.fit import Run
from megappo.trainer.output import Screen, redirect_to
from megappo.trainer.ppo_trainer import PPOTrainer
from megappo.trainer.preflight import Preflight, check_here
from megappo.trainer.profiler import StepProfiler
from megappo.trainer.records import Records
from megappo.trainer.run_state import checkpoint_state
from megappo.trainer.saver import Saver
from megappo.trainer.servers import check_servers
from megappo.trainer.signals import StopSignals
from megappo.trainer.status import Status

ENGINES = {
    "sglang": "SGLang, one engine a rank",
    "megatron": "megatron: the trained weights themselves, one engine a tensor-parallel group",
}
"""How the start of a run names `rollout.engine`."""


class Session:
    """Checks, starts, trains and ends; `report` is how any of it reaches the screen."""

    def __init__(self) -> None:
        self._launch: LaunchEnvironment | None = None
        self._screen: Screen | None = None
        self._log_file: Path | None = None
        self._signals = StopSignals()
        self._joined = False
        self._started = time.monotonic()
        self._watchdog: Watchdog | None = None

    def run(self, config_path: str, overrides: Sequence[str]) -> None:
        """The whole run. Collective over the world after the checks.

        Raises:
            UserError: from the checks, before a device, a model or an engine is touched.
            GuardStop, StopRequested: see `Run.fit`.
        """
        launch = self._launch = LaunchEnvironment.read()
        config, mistakes = read(config_path, overrides)
        check_slurm_nodes(launch.num_nodes, launch.slurm_nodes)
        # A node whose config is mistaken says so at once, and does not wait for the others.
        meets = launch.num_nodes > 1 and not mistakes.problems
        agreement = self._meet_nodes(config, launch) if meets else None
        with self._all_nodes_or_none(agreement, config):
            device, found = check_here(config, launch, mistakes)
            self._say_plan(config, found, device)
            finished = self._is_finished(config, found)
            if not finished:
                self._check_servers(config, found, device)
        if finished:
            return
        run_dir = Path(config.trainer.run_dir)
        self._log_file = run_dir / "logs" / f"rank_{launch.rank:05d}.log"
        self._screen = redirect_to(self._log_file)
        context = parallel.start(
            launch,
            Degrees.of(config.parallel),
            device=device,
            seed=config.trainer.seed,
            timeout_s=config.trainer.distributed_timeout_s,
            store=None if agreement is None else agreement.store,
        )
        # Not earlier: a rank that waits for another to join must die of the launcher's signal.
        self._signals.catch()
        self._joined = True
        self._watchdog = Watchdog(
            context,
            address=launch.address,
            timeout_s=config.watchdog.timeout_s,
            on_hang=partial(self._report_hang, run_dir),
        )
        self._watchdog.start()
        try:
            self._train(config, found, context, run_dir)
        except (GuardStop, StopRequested):  # all ranks end now, each in its time
            self._watchdog.stop()
            raise
        self._watchdog.leave()
        parallel.stop(context)

    def _meet_nodes(self, config: Config, launch: LaunchEnvironment) -> NodeAgreement:
        """Finds the other nodes and compares this one with them. Collective over the world."""
        interface, address = choose_gloo_interface(launch.address)
        wait_s = config.trainer.node_wait_s
        facts = gather_facts(
            flatten(config),
            node=launch.node,
            address=address,
            num_nodes=launch.num_nodes,
            local_world_size=launch.local_world_size,
        )
        agreement = NodeAgreement.join(launch, host=facts.host, wait_s=wait_s)
        self._say(f"nodes      {agreement.compare(facts, wait_s=wait_s)}; gloo on {interface}")
        if launch.rank == 0:
            self._launch = replace(launch, restarts=agreement.restarts())
        return agreement

    @staticmethod
    def _all_nodes_or_none(
        agreement: NodeAgreement | None, config: Config
    ) -> AbstractContextManager[None]:
        if agreement is None:  # ranks of one node all find the same
            return nullcontext()
        return agreement.all_or_none(wait_s=config.trainer.distributed_timeout_s)

    def _is_finished(self, config: Config, found: Preflight) -> bool:
        """Whether an earlier start has done all there is, which is said."""
        exported = not config.checkpoint.export_hf or exported_step(config) == found.resumed_step
        if found.resumed_step < found.total_steps or not exported:
            return False
        self._say(
            f"nothing to do: {found.checkpoint} has finished {found.end_in_words}; raise "
            f"trainer.{'total_steps' if config.trainer.total_steps else 'total_epochs'} to go on"
        )
        return True

    def report(self, text: str) -> None:
        """One message on the user's stderr, from rank 0."""
        if self._launch is None or self._launch.rank == 0:
            self._write(self._screen.err if self._screen else sys.stderr, text)

    def report_on_node(self, text: str) -> None:
        """One message on each node's stderr, before the ranks have joined."""
        assert self._launch is not None
        if self._launch.local_rank == 0:
            self._write(sys.stderr, text)

    def report_user_error(self, error: UserError) -> None:
        """A mistake of the user's.

        Before the ranks have joined all of them find the same, and the first of each node speaks.
        Later (a row that only one rank draws, say) it is the one that met it.
        """
        launch = self._launch
        if launch is None or self._joined:
            rank = f" (rank {launch.rank})" if launch is not None else ""
            self._write(self._screen.err if self._screen else sys.stderr, f"error: {error}{rank}")
            self._tell_others("a rank met a mistake in the input")
        elif launch.local_rank == 0:
            self._write(self._screen.err if self._screen else sys.stderr, f"error: {error}")

    def report_failure(self, error: Exception) -> None:
        """What went wrong on this rank: the message on the screen, the traceback in the log."""
        rank = self._launch.rank if self._launch else 0
        stream = self._screen.err if self._screen else sys.stderr
        traceback.print_exc()
        where = f" (traceback in {self._log_file})" if self._log_file else ""
        self._write(stream, f"rank {rank} failed: {type(error).__name__}: {error}{where}")
        self._tell_others(f"rank {rank} failed")

    def _tell_others(self, text: str) -> None:
        if self._watchdog is not None:
            self._watchdog.report_failure(text)
            self._watchdog.stop()

    def _report_hang(self, run_dir: Path, found: HangReport) -> None:
        """Called from the watchdog's thread while the main one is stuck."""
        path = run_dir / "hang_report.txt"
        path.write_text(found.text)
        Records.append_event(run_dir, "hang", found.step, text=found.summary, ranks=found.ranks)
        self._write(
            self._screen.err if self._screen else sys.stderr,
            f"{found.summary}; stacks and last collectives are in {path}; all ranks end",
        )

    def _train(
        self, config: Config, found: Preflight, context: ParallelContext, run_dir: Path
    ) -> None:
        from megappo.trainer.build import build_evaluator, build_trainer

        if context.is_main:
            dump(config, run_dir / "config.yaml")
        started = time.perf_counter()
        assert self._log_file is not None
        assert self._launch is not None
        engine_log = self._log_file.with_name(self._log_file.name.replace("rank", "engine"))
        trainer = build_trainer(config, found, context, log_file=engine_log)
        records = None
        loggers: list[Logger] = []
        if context.is_main:
            self._say(f"ready      models and engines up in {time.perf_counter() - started:.0f} s")
            records = Records(
                run_dir,
                rollouts_per_step=config.trainer.rollouts_per_step,
                tokens_per_sample=config.trainer.rollout_tokens_per_sample,
            )
            loggers = self._make_loggers(config, found, run_dir, records)
        profiler = self._make_profiler(config, context, records)
        run = Run(
            config=config,
            trainer=trainer,
            evaluator=build_evaluator(config, found, context, trainer.collector.scorer.scorer),
            saver=self._make_saver(config, found, trainer, records),
            loggers=loggers,
            records=records,
            profiler=profiler,
            tokenizer=found.tokenizer,
            total_steps=found.total_steps,
            changes=found.changes,
            stop_requested=partial(self._stop_requested, config.trainer.max_wall_time_s),
            say=self._say,
            local_world_size=self._launch.local_world_size,
            restarts=self._launch.restarts,
        )
        self._let_watch(trainer, Status(run_dir if context.is_main else None), profiler)
        try:
            run.fit(found.checkpoint)
        finally:
            run.close()
        self._say(f"done       {found.end_in_words}; results in {run_dir}")

    def _make_saver(
        self, config: Config, found: Preflight, trainer: PPOTrainer, records: Records | None
    ) -> Saver:
        assert self._launch is not None
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
            ranks_on_node=self._launch.local_world_size,
            save_freq=config.trainer.save_freq,
            state=lambda: checkpoint_state(config, trainer, found.train_files, found.base_weights),
            say=self._say,
            event=records.event if records is not None else _no_event,
        )

    def _make_profiler(
        self, config: Config, context: ParallelContext, records: Records | None
    ) -> StepProfiler:
        def report(step: int, text: str, details: dict[str, Any]) -> None:
            if records is not None:
                self._say(f"profile    step {step}: {text}")
                records.event("profiled", step, **details)

        return StepProfiler(
            steps=frozenset(config.trainer.profile_steps),
            folder=Path(config.trainer.run_dir) / "profile",
            rank=context.rank,
            device=context.device,
            max_gb=config.trainer.profile_max_gb,
            report=report,
        )

    def _let_watch(self, trainer: PPOTrainer, status: Status, profiler: StepProfiler) -> None:
        """Phases and forward passes of all models move the watchdog's count."""
        watchdog = self._watchdog
        assert watchdog is not None

        def enter(step: int, phase: str) -> None:
            watchdog.enter(step, phase)
            status.enter(phase, step)
            profiler.watch()

        def pass_begins(module: object, inputs: object) -> None:
            watchdog.move()
            profiler.watch()

        trainer.on_phase = enter
        reference = [] if trainer.reference is None else [trainer.reference.network]
        for network in (*trainer.networks.values(), *reference):
            for chunk in network.chunks:
                chunk.register_forward_pre_hook(pass_begins)

    def _stop_requested(self, max_wall_time_s: float) -> str:
        """Why this rank should stop, or nothing."""
        if self._signals.name:
            return self._signals.name
        if max_wall_time_s and time.monotonic() - self._started > max_wall_time_s:
            return f"trainer.max_wall_time_s ({max_wall_time_s:g})"
        return ""

    def _make_loggers(
        self, config: Config, found: Preflight, run_dir: Path, records: Records
    ) -> list[Logger]:
        assert self._screen is not None
        first = found.resumed_step + 1 if found.checkpoint is not None else 0
        settings = LoggerSettings(
            run_dir=run_dir,
            first_step=first,
            total_steps=found.total_steps,
            terminal=self._screen.out,
            tracking=config.tracking,
            config=flatten(config),
        )

        def report(step: int, text: str) -> None:
            self._say(f"warning    step {step}: {text}")
            try:
                records.event("logger_failed", step, text=text)
            except OSError as error:  # the same full disk
                self._say(f"warning    events.jsonl cannot be written: {error}")

        return [
            ContainedLogger(name, partial(LOGGERS[name], settings), report=report, first_step=first)
            for name in config.loggers
        ]

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
        assert self._launch is not None
        if not config.rollout.url or self._launch.rank != 0:
            return
        for url in config.rollout.url:
            self._say(f"server     {url}: asking, for up to {config.rollout.server_wait_s:g} s")
        for facts in check_servers(config, found, device=device):
            self._say(f"server     {facts.line()}")

    def _say(self, text: str) -> None:
        assert self._launch is not None
        if self._launch.rank == 0:
            self._write(self._screen.out if self._screen else sys.stdout, text)

    @staticmethod
    def _write(stream: TextIO, text: str) -> None:
        stream.write(text + "\n")
        stream.flush()


def _no_event(kind: str, step: int, **details: Any) -> None:
    """Events of ranks other than 0: the same ones, which rank 0 writes."""
