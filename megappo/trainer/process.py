"""One process of a run: its place, screen, log, signals and watchdog, from launch to teardown."""

from __future__ import annotations

import sys
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from megappo.checkpoint.compare import flatten
from megappo.config.layout import ParallelSection
from megappo.distributed import parallel
from megappo.distributed.environment import LaunchEnvironment, check_slurm_nodes
from megappo.distributed.node_agreement import NodeAgreement
from megappo.distributed.node_facts import gather_facts
from megappo.distributed.node_network import choose_gloo_interface
from megappo.distributed.parallel import Degrees, ParallelContext
from megappo.distributed.watchdog import HangReport, Watchdog
from megappo.errors import SharedDataError, UserError
from megappo.trainer.output import Screen, redirect_to
from megappo.trainer.records import Records
from megappo.trainer.signals import StopSignals


class Process:
    """What every kind of training shares around it; `report` is how any of it reaches the screen.

    Reading the environment comes first (`launch`), joining the others after all checks (`join`).
    """

    def __init__(self) -> None:
        self._launch: LaunchEnvironment | None = None
        self._screen: Screen | None = None
        self._log_file: Path | None = None
        self._signals = StopSignals()
        self._joined = False
        self._started = time.monotonic()
        self._watchdog: Watchdog | None = None
        self._agreement: NodeAgreement | None = None

    def start(self) -> LaunchEnvironment:
        """Reads what torchrun has set.

        Raises:
            UserError: of `LaunchEnvironment.read`.
        """
        self._launch = LaunchEnvironment.read()
        # The time that a job has does not begin anew with ranks that its launcher starts again.
        self._started = min(self._started, time.monotonic() - self._launch.launcher_age_s)
        check_slurm_nodes(self._launch.num_nodes, self._launch.slurm_nodes)
        return self._launch

    def meet_nodes(self, config: Any, *, wait_s: float) -> None:
        """Finds the other nodes and compares this one with them, if there are several.

        Collective over the world.

        Args:
            config: of the run.
            wait_s: that nodes wait for one another.
        """
        launch = self.launch
        if launch.num_nodes == 1:
            return
        interface, address = choose_gloo_interface(launch.address)
        facts = gather_facts(
            flatten(config),
            node=launch.node,
            address=address,
            num_nodes=launch.num_nodes,
            local_world_size=launch.local_world_size,
        )
        self._agreement = NodeAgreement.join(launch, host=facts.host, wait_s=wait_s)
        self.say(f"nodes      {self._agreement.compare(facts, wait_s=wait_s)}; gloo on {interface}")
        if launch.rank == 0:
            self._launch = replace(launch, restarts=self._agreement.restarts())

    def all_nodes_or_none(self, *, wait_s: float) -> AbstractContextManager[None]:
        """A block of checks in which one node alone may fail; then all of them do."""
        if self._agreement is None:  # ranks of one node all find the same
            return nullcontext()
        return self._agreement.all_or_none(wait_s=wait_s)

    @property
    def launch(self) -> LaunchEnvironment:
        """Of `start`."""
        assert self._launch is not None
        return self._launch

    @property
    def screen(self) -> Screen:
        """The user's, after `join`."""
        assert self._screen is not None
        return self._screen

    @property
    def log_file(self) -> Path:
        """Of this rank, after `join`."""
        assert self._log_file is not None
        return self._log_file

    @property
    def watchdog(self) -> Watchdog:
        """Running, after `join`."""
        assert self._watchdog is not None
        return self._watchdog

    def join(
        self,
        layout: ParallelSection,
        *,
        device: str,
        run_dir: Path,
        seed: int,
        timeout_s: float,
        hang_timeout_s: float,
    ) -> ParallelContext:
        """Turns to the log, joins the other ranks, starts the watchdog. Collective over the world.

        Args:
            layout: of the run.
            device: `cpu` or `cuda`.
            run_dir: the run's folder.
            seed: of random streams.
            timeout_s: limit of one collective.
            hang_timeout_s: of the watchdog.
        """
        launch = self.launch
        self._log_file = run_dir / "logs" / f"rank_{launch.rank:05d}.log"
        self._screen = redirect_to(self._log_file)
        context = parallel.start(
            launch,
            Degrees.of(layout),
            device=device,
            seed=seed,
            timeout_s=timeout_s,
            store=None if self._agreement is None else self._agreement.store,
        )
        # Not earlier: a rank that waits for another to join must die of the launcher's signal.
        self._signals.catch()
        self._joined = True
        self._watchdog = Watchdog(
            context,
            address=launch.address,
            timeout_s=hang_timeout_s,
            on_hang=partial(self._report_hang, run_dir),
        )
        self._watchdog.start()
        return context

    def leave(self, context: ParallelContext) -> None:
        """After a run that went well. Collective over the world."""
        self.watchdog.leave()
        parallel.stop(context)

    def report(self, text: str) -> None:
        """One message on the user's stderr, from rank 0."""
        if self._launch is None or self._launch.rank == 0:
            _write(self._screen.err if self._screen else sys.stderr, text)

    def report_on_node(self, text: str) -> None:
        """One message on each node's stderr, before the ranks have joined."""
        if self.launch.local_rank == 0:
            _write(sys.stderr, text)

    def report_user_error(self, error: UserError) -> None:
        """A mistake of the user's.

        Before the ranks have joined all of them find the same, and the first of each node speaks.
        Later (a row that only one rank draws, say) it is the one that met it.
        """
        launch = self._launch
        if isinstance(error, SharedDataError):
            self.report(f"error: {error}")
            self._stop_watchdog()
        elif launch is None or self._joined:
            rank = f" (rank {launch.rank})" if launch is not None else ""
            _write(self._screen.err if self._screen else sys.stderr, f"error: {error}{rank}")
            self._tell_others("a rank met a mistake in the input")
        elif launch.local_rank == 0:
            _write(self._screen.err if self._screen else sys.stderr, f"error: {error}")

    def report_failure(self, error: Exception) -> None:
        """What went wrong on this rank: the message on the screen, the traceback in the log."""
        rank = self._launch.rank if self._launch else 0
        stream = self._screen.err if self._screen else sys.stderr
        where = f" (traceback in {self._log_file})" if self._log_file else ""
        try:
            traceback.print_exc()
        finally:  # the log's disk may be full
            _write(stream, f"rank {rank} failed: {type(error).__name__}: {error}{where}")
            self._tell_others(f"rank {rank} failed")

    def say(self, text: str) -> None:
        """A line on the user's stdout, from rank 0."""
        if self.launch.rank == 0:
            _write(self._screen.out if self._screen else sys.stdout, text)

    def stop_requested(self, max_wall_time_s: float) -> str:
        """Why this rank should stop, or nothing."""
        if self._signals.name:
            return self._signals.name
        if max_wall_time_s and time.monotonic() - self._started > max_wall_time_s:
            return f"trainer.max_wall_time_s ({max_wall_time_s:g})"
        return ""

    def _tell_others(self, text: str) -> None:
        if self._watchdog is not None:
            self._watchdog.report_failure(text)
        self._stop_watchdog()

    def _stop_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()

    def _report_hang(self, run_dir: Path, found: HangReport) -> None:
        """Called from the watchdog's thread while the main one is stuck."""
        path = run_dir / "hang_report.txt"
        where = f"stacks and last collectives are in {path}"
        try:
            path.write_text(found.text)
            Records.append_event(run_dir, "hang", found.step, text=found.summary, ranks=found.ranks)
        except OSError as error:
            where = f"stacks and last collectives cannot be written to {path}: {error}"
        _write(
            self._screen.err if self._screen else sys.stderr,
            f"{found.summary}; {where}; all ranks end",
        )


def _write(stream: TextIO, text: str) -> None:
    stream.write(text + "\n")
    stream.flush()
