"""Entry of a training run.

    torchrun --nproc-per-node N -m megappo.train CONFIG.yaml [section.key=value ...]

Every rank runs this program. Light to import: SGLang's spawned processes import it again.

Exit codes: 0 done, 1 failed, 2 bad usage or config, 3 stopped by a guard, 75 stopped on a signal
and resumable by the same command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megappo.distributed.launcher_death import die_with_launcher
from megappo.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_GUARD,
    EXIT_RESUMABLE,
    EXIT_USAGE,
    GuardStop,
    NodesMissingError,
    RanksDifferError,
    SaveError,
    StopRequested,
    UserError,
)

if TYPE_CHECKING:
    from megappo.trainer.process import Process

USAGE = "usage: torchrun --nproc-per-node N -m megappo.train CONFIG.yaml [section.key=value ...]"


def main(arguments: Sequence[str]) -> int:
    """Runs to the end and returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stderr.write(USAGE + "\n")
        return EXIT_DONE if arguments else EXIT_USAGE
    die_with_launcher()  # before torch is imported, which takes seconds
    from megappo.trainer.process import Process

    process = Process()
    try:
        _run(process, arguments[0], arguments[1:])
    except UserError as error:
        process.report_user_error(error)
        return EXIT_USAGE
    except GuardStop as stop:
        process.report(f"stopped by a guard: {stop}")
        return EXIT_GUARD
    except StopRequested as stop:
        process.report(f"{stop}; start the same command to go on")
        return EXIT_RESUMABLE
    except NodesMissingError as error:  # not known to the rank that others miss
        process.report_on_node(f"failed: {error}")
        return EXIT_FAILED
    except (RanksDifferError, SaveError) as error:  # on all ranks alike: told once
        process.report(f"failed: {error}")
        return EXIT_FAILED
    except Exception as error:
        process.report_failure(error)
        return EXIT_FAILED
    return EXIT_DONE


def _run(process: Process, config_path: str, overrides: Sequence[str]) -> None:
    """By the config's `task`: PPO, or training on given answers."""
    from megappo.config.load import task_of

    process.start()
    if task_of(config_path, overrides) == "ppo":
        from megappo.trainer.session import Session

        Session(process).run(config_path, overrides)
    else:
        from megappo.trainer.supervised.session import SupervisedSession

        SupervisedSession(process).run(config_path, overrides)


if __name__ == "__mp_main__":  # in a process of an engine, before it imports SGLang for seconds
    from megappo.rollout.sglang_orphans import ask_for_end

    ask_for_end()

if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
