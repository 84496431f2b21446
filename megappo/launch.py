"""torchrun on this node, with exit codes kept.

    python -m megappo.launch --nproc-per-node N CONFIG.yaml [section.key=value ...]

torchrun itself turns every failure of a rank into exit code 1 and a traceback of its own. This runs
the same launcher in-process and passes on the code of the rank that failed first, so that 2 (bad
config), 3 (guard) and 75 (resumable) reach scripts and Slurm. All of torchrun's options may stand
before the config.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megappo.distributed.early_signals import resumable_before_ranks
from megappo.distributed.launcher_death import LAUNCHER_PID
from megappo.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, EXIT_USAGE

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

USAGE = "usage: python -m megappo.launch [torchrun options] CONFIG.yaml [section.key=value ...]"


SHUTDOWN_TIMEOUT_S = 1800
"""torchrun gives its ranks 30 s after a signal; a rank may need more to end its step and save."""
_BEFORE_SIGKILL_S = 15
"""Less than torchrun waits between SIGTERM and SIGKILL after a rank has failed."""

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""What is passed on to the ranks; torchrun itself dies of SIGUSR1, Slurm's warning."""
_LOG_OPTIONS = ("--log", "--logs", "-r", "--redirects", "-t", "--tee")
"""Torchrun's options that ask for files of its own."""


def main(arguments: Sequence[str], *, fixed: Sequence[str] = ()) -> int:
    """Starts the ranks and returns the run's exit code.

    Args:
        arguments: torchrun's options, the config and overrides.
        fixed: more overrides, which win.
    """
    before, after = _split(arguments)
    if not after:
        sys.stderr.write(USAGE + "\n")
        return EXIT_USAGE
    with resumable_before_ranks(SIGNALS.split(",")):
        return start_ranks(before, [*after, *fixed])


def start_ranks(options: Sequence[str], arguments: Sequence[str]) -> int:
    """Runs this node's ranks to their end and returns the run's exit code.

    Args:
        options: torchrun's.
        arguments: the run's own, the config first.
    """
    return run_program(options, ["-m", "megappo.train", *arguments])


def run_program(options: Sequence[str], program: Sequence[str]) -> int:
    """Runs a program on this node's ranks to its end and returns its exit code.

    Args:
        options: torchrun's.
        program: a script, or `-m` and a module, with its arguments.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import get_args_parser, run

    patience = ["--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S), "--signals-to-handle", SIGNALS]
    if not any(option.startswith(_LOG_OPTIONS) for option in options):
        patience += ["--log-dir", os.devnull]  # torchrun leaves an empty folder behind otherwise
    args = get_args_parser().parse_args([*patience, *options, *program])
    os.environ[LAUNCHER_PID] = str(os.getpid())
    try:
        run(args)
    except SignalException as error:  # the ranks had the signal too, and have ended
        return _code_after_signal(_exit_codes(error), error.sigval)
    except RendezvousError as error:
        # Of several nodes, at the start or when ranks are to be started again.
        sys.stderr.write(
            "failed: the nodes do not come together (again): another one has ended, or cannot be "
            f"reached ({type(error).__name__}: {error}); look at its output, and start the same "
            "command on all nodes to go on from the last checkpoint\n"
        )
        return EXIT_FAILED
    except ChildFailedError as error:
        first = error.get_first_failure()[1]
        for rank, failure in error.failures.items():
            if _was_killed(failure, first):
                sys.stderr.write(
                    f"rank {rank} (process {failure.pid}) was ended by {failure.signal_name()}, "
                    "and the other ranks were stopped: look for who sent it (SIGKILL: often the "
                    "kernel, when host memory ran out); start the same command to go on from the "
                    "last checkpoint\n"
                )
        return first.exitcode if first.exitcode > 0 else EXIT_FAILED
    return EXIT_DONE


def _exit_codes(error: SignalException) -> list[int | None]:
    """Of the ranks that the signal reached; None of one that has not ended.

    Torchrun forgets them. The agent that had the ranks is in the frames that the exception crossed.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    for frame, _ in traceback.walk_tb(error.__traceback__):
        agent = frame.f_locals.get("self")
        if isinstance(agent, LocalElasticAgent) and agent._pcontext is not None:
            return [rank.proc.poll() for rank in agent._pcontext.subprocess_handlers.values()]
    return []


def _code_after_signal(codes: Sequence[int | None], signal_number: int) -> int:
    """75 only if the run can go on: the ranks have saved, or the signal met them before they could.

    A save that fails is 1 and a guard's stop 3, with a signal or without: Slurm would requeue 75.

    Args:
        codes: of the ranks; None of one that was left behind, at a second signal.
        signal_number: that the launcher passed on.
    """
    if not codes or None in codes or -signal_number in codes:
        return EXIT_RESUMABLE
    failed = [code for code in codes if code not in (EXIT_DONE, EXIT_RESUMABLE)]
    if failed:
        return max((code for code in failed if code is not None and code > 0), default=EXIT_FAILED)
    return EXIT_RESUMABLE if EXIT_RESUMABLE in codes else EXIT_DONE


def _was_killed(failure: ProcessFailure, first: ProcessFailure) -> bool:
    """Whether a rank ended by a signal that the launcher did not send.

    The launcher sends SIGTERM when a rank has failed, and half a minute later SIGKILL. A rank whose
    peer was killed may fail before the launcher looks.
    """
    by_signal = failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
    return by_signal and bool(failure.timestamp - first.timestamp < _BEFORE_SIGKILL_S)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Torchrun's options, and from the first YAML file on the run's own arguments."""
    for i, text in enumerate(arguments):
        if text.endswith((".yaml", ".yml")):
            return list(arguments[:i]), list(arguments[i:])
    return list(arguments), []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
