"""Runs of tools/bench/ranks.py on 2 and on 4 ranks; prints their figures as JSON, a line each.

This process imports everything once, and each rank is a fork of it: imports would take most of the
time. It starts no thread and computes nothing itself, so that it can be forked.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from tests.distributed.launch import free_port
from tools.bench.ranks import count_collectives, figures, overrides_of, run_counted

HEAVY = (
    "megappo.trainer.process", "megappo.trainer.session", "megappo.trainer.build",
    "megappo.trainer.fit", "megappo.rollout.megatron_engine", "transformers", "tests.tiny_run",
)  # fmt: skip


def fork(work: Callable[[], int]) -> int:
    """The id of a new process that does `work` and ends with what it returns."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = work()
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(children: list[int]) -> None:
    """Until all have ended; the first failure ends this process, and `run_ranks` the others."""
    for _ in children:
        child, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        if code:
            sys.exit(f"process {child} ended with {code}")


def make(folder: Path) -> int:
    """Model, data and config."""
    from tests.tiny_run import make_run

    make_run(folder, tie_word_embeddings=False)
    return 0


def main() -> None:
    """Makes the run's files, then runs it on 2 ranks, then on 4."""
    folder = Path(sys.argv[1])
    counts: dict[str, float] = defaultdict(float)
    count_collectives(counts)  # before Megatron takes hold of them
    for name in HEAVY:
        importlib.import_module(name)
    wait([fork(lambda: make(folder))])
    for num_ranks in (2, 4):
        out = folder / f"ranks_{num_ranks}"
        out.mkdir()
        os.environ |= {
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
        }

        def work(rank: int, num_ranks: int = num_ranks, out: Path = out) -> int:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            config = str(folder / "run.yaml")
            return run_counted(out, config, overrides_of(num_ranks, out), counts)

        wait([fork(lambda rank=rank: work(rank)) for rank in range(num_ranks)])
        print("FIGURES " + json.dumps(figures(num_ranks, out)))


if __name__ == "__main__":
    main()
