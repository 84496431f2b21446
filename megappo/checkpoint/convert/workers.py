"""Runs the parts of a conversion in this process or in several, and adds up what they report."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from megappo.checkpoint.convert.output import Progress
from megappo.errors import CheckpointError

Job = TypeVar("Job")
Result = TypeVar("Result")
Report = Callable[[int], None]
"""Called with the number of bytes written since the last call."""


def run_jobs(
    work: Callable[[Job, Report], Result],
    jobs: Sequence[Job],
    *,
    num_workers: int,
    progress: Progress,
) -> list[Result]:
    """Results of all jobs, in their order. The first error of any worker ends all, and is raised.

    Args:
        work: A function of a module, so that it can be sent to a new process.
        jobs: What can be pickled; worker i does every `num_workers`-th.
        num_workers: Processes; 1 works in this one.
        progress: Told of every report.
    """
    if num_workers == 1 or len(jobs) == 1:
        return [work(job, progress.add) for job in jobs]
    context = multiprocessing.get_context("spawn")
    shares = [jobs[i::num_workers] for i in range(min(num_workers, len(jobs)))]
    processes, connections = [], []
    for share in shares:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(theirs, work, share), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        connections.append(ours)
    try:
        results = _collect(connections, progress)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [results[j % len(shares)][j // len(shares)] for j in range(len(jobs))]


def _serve(connection: Connection, work: Callable[[Any, Report], Any], jobs: Sequence[Any]) -> None:
    """A worker: sends byte counts, then its results or the error that ended it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends the workers
    try:
        connection.send([work(job, connection.send) for job in jobs])
    except Exception as error:  # handed on whole: the parent raises it
        connection.send(error)


def _collect(connections: Sequence[Connection], progress: Progress) -> list[list[Any]]:
    found: dict[int, list[Any]] = {}
    open_ones = {connection: i for i, connection in enumerate(connections)}
    while open_ones:
        for ready in wait(list(open_ones)):
            assert isinstance(ready, Connection)
            try:
                message = ready.recv()
            except EOFError as error:
                raise CheckpointError(
                    "a worker process was killed, or ran out of memory; try fewer --workers"
                ) from error
            if isinstance(message, int):
                progress.add(message)
            elif isinstance(message, Exception):
                raise message
            else:
                found[open_ones.pop(ready)] = message
    return [found[i] for i in range(len(connections))]
