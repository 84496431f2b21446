"""Kills ranks, launchers and engines of tiny runs at random moments until the runs have finished.

    python tools/chaos.py --work DIR --kills 100 --log kills.jsonl    # all layouts in turn
    python tools/chaos.py --work DIR --kills 8 --seed 3 --layouts tp2
    python tools/chaos.py --table kills.jsonl                         # what was seen so far

Each layout is trained undisturbed once. Then a run is started, killed in a random moment, started
again by the same command, and so on until it has finished, and the next such run begins. Victims
are a random rank, the launcher, all processes at once (as when a machine is lost) and, with SGLang,
a process of an engine, after which the run goes on by itself. Moments are all phases of a step, the
start, the export, and those of a save: while files are written, between the rename and `latest`,
while an old one is removed. Pairs of victim and moment come in a shuffled order that `--seed` sets.

After each kill all processes must be gone within a minute, `latest` must name a checkpoint that is
no older than the one before, and every checkpoint must be the undisturbed run's of that step, file
by file. At the end metrics, samples, weights, the last checkpoint and the events are compared, bit
for bit, and no file may be left behind. Nothing in a run is patched. Exit code 1 if anything
differs. `tools/engine_kills.py` is about engines and about single phases in more layouts.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megappo.checkpoint import layout as checkpoints  # noqa: E402
from tests.tiny_run import make_run  # noqa: E402
from tools.kills.checks import Undisturbed, problems_after_kill, problems_at_end  # noqa: E402
from tools.kills.kill_log import VICTIMS, Kill, Log, Run, read, table  # noqa: E402
from tools.kills.moments import MOMENTS, wait_for, was_hit  # noqa: E402
from tools.kills.runs import Layout, WatchedRun, timings  # noqa: E402

_COMMON = (
    "trainer.save_freq=1", "trainer.test_freq=1", "checkpoint.keep=2", "rollout.n=2",
    "guard.rules.grad_norm.above=1000",
)  # fmt: skip
_IN_PROCESS = (
    "rollout.engine=megatron", "rollout.max_running_requests=12", "loggers=[console,jsonl]"
)  # fmt: skip
LAYOUTS = {
    "dp2": Layout(ranks=2, overrides=_IN_PROCESS),
    "tp2": Layout(
        ranks=2,
        overrides=(
            *_IN_PROCESS, "parallel.tp=2",
            "checkpoint.async_save=false", "checkpoint.keep_best=true",
        ),
    ),
    "pp2": Layout(ranks=2, overrides=("parallel.pp=2", "rollout.max_restarts=1000")),
}  # fmt: skip
"""All on two ranks. `pp2` generates with SGLang; `tp2` saves in line, the others asynchronously."""
ENGINE_MOMENTS = ("generate", "update_actor", "sync", "validate", "save")
GONE_LIMIT_S = 60.0
"""For every process of a run to end after the kill."""
STALL_LIMIT_S = 300.0
"""For a moment to come, or the run to end: longer is a hang."""

Blow = tuple[str, str]
"""Victim and moment."""


class Harness:
    """One layout: its undisturbed run, and those that are killed."""

    def __init__(
        self,
        name: str,
        *,
        work: Path,
        steps: int,
        rng: random.Random,
        log: Log,
        niceness: int = 0,
    ) -> None:
        self.name = name
        self._niceness = niceness
        self._folder = work / name
        self._steps, self._rng, self._log = steps, rng, log
        self._config = self._folder / "run.yaml"
        make_run(self._folder, tie_word_embeddings=False)
        started = time.monotonic()
        run = self.start(self._folder / "undisturbed")
        while run.status()[1] == "start" and run.runs:
            time.sleep(0.05)
        starting_s = time.monotonic() - started
        try:
            self.undisturbed = Undisturbed.watched(run, STALL_LIMIT_S)
        finally:
            run.end()
        self._lengths = {**timings(run.run_dir), "start": starting_s}
        del self._lengths["save"]  # the time of all waiting for saves, not of the phase

    def live(self, number: int, deck: list[Blow], *, max_kills: int) -> Run:
        """One run that is killed and started again until it has finished.

        Args:
            number: of the run, for its folder.
            deck: kills to come; those that came are taken out of it.
            max_kills: after which the run is left in peace.
        """
        life = Run(layout=self.name, run=f"run_{number}")
        run_dir, began = self._folder / life.run, time.monotonic()
        # An empty folder is no checkpoint; made by the first save, it could not be watched in time.
        checkpoints.folder_of(run_dir).mkdir(parents=True)
        newest, left = 0, []
        while True:
            run = self.start(run_dir)
            life.starts += 1
            try:
                finished = self._disturb(run, life, deck, max_kills, newest)
                left = run.leftovers()
            finally:
                run.end()
            if finished or life.problems:
                break
            found = checkpoints.latest(checkpoints.folder_of(run_dir))
            newest = int(found.name.split("_")[1]) if found else 0
        if not life.problems:
            life.problems += problems_at_end(run_dir, self.undisturbed)
        life.temporary = sorted({*left, *(p.name for p in run.temporary.iterdir())})
        life.seconds = time.monotonic() - began
        return life

    def _disturb(
        self, run: WatchedRun, life: Run, deck: list[Blow], max_kills: int, newest: int
    ) -> bool:
        """One start: kills until one ends it. True if it has ended well by itself."""
        resumed = checkpoints.latest(checkpoints.folder_of(run.run_dir))
        missed: list[Blow] = []
        killed = False
        while not missed and not killed and life.kills < max_kills:
            blow = next((b for b in reversed(deck) if self._can_come(b, newest)), None)
            if blow is None:
                break
            deck.remove(blow)
            kill = self._strike(run, life, blow, newest)
            if kill is None:
                missed.append(blow)
                continue
            life.kills += 1
            killed = blow[0] != "engine"
            life.problems += kill.problems
            self._log.add("kill", kill)
        self._rng.shuffle(missed)
        deck[:0] = missed  # for a later run
        if killed or life.problems:
            return False
        return self._ends_well(run, life, resumed)

    def _can_come(self, blow: Blow, newest: int) -> bool:
        """Whether a start that goes on after step `newest` meets the moment at all."""
        if blow[1] == "resume":
            return newest > 0
        return newest < self._steps or blow[1] in ("start", "sync", "export")

    def _strike(self, run: WatchedRun, life: Run, blow: Blow, newest: int) -> Kill | None:
        """Waits for a moment, kills, and looks at what is left; None if the run ended before."""
        victim, moment = blow[0], MOMENTS[blow[1]]
        # To look for processes takes longer than some moments.
        while "start" not in moment.phases and run.runs:
            if len(run.rank_pids()) == LAYOUTS[self.name].ranks:
                break
            time.sleep(0.1)
        skips = not moment.once and newest < self._steps - 1 and self._rng.random() < 0.3
        why = wait_for(
            moment, run, self._rng, self._lengths, skip=int(skips), limit_s=STALL_LIMIT_S
        )
        if why == "hangs":
            life.problems.append(f"hang before {blow}: {run.status()}: {run.screen[-1000:]}")
        if why:
            return None
        while run.runs:
            if victims := self._victims(run, victim, is_event=moment.event is not None):
                break
            time.sleep(0.05)  # none is started yet
        else:
            return None
        for pid in victims:
            _kill(pid)
        killed_at = time.monotonic()
        step, phase = run.status()
        kill = Kill(
            layout=self.name, run=life.run, victim=victim, moment=blow[1], step=step, phase=phase
        )
        if victim == "engine":
            kill.hit = phase in moment.phases
            return kill
        if victim == "all":
            for process in run.survivors():  # such as were just being started
                _kill(process.pid)
        orphans = run.wait_until_gone(GONE_LIMIT_S)
        kill.gone_s = time.monotonic() - killed_at
        kill.problems += [f"orphan: {p.pid} {p.name()}" for p in orphans]
        kill.exit_code = run.wait(GONE_LIMIT_S)
        if kill.exit_code == 0 and phase not in ("export", "done") and " to do" not in run.screen:
            kill.problems.append(f"exit code 0 after a kill in {phase}")
        folder = checkpoints.folder_of(run.run_dir)
        kill.hit = was_hit(moment, phase, folder)
        kill.problems += problems_after_kill(folder, self.undisturbed, newest=newest)
        return kill

    def _victims(self, run: WatchedRun, victim: str, *, is_event: bool) -> list[int]:
        """Process ids in the order of their deaths; none while ranks or engines start."""
        ranks = run.rank_pids() if victim in ("all", "rank") else []
        if victim == "launcher":
            return [run.launcher.pid]
        if victim == "all":
            return self._rng.sample([run.launcher.pid, *ranks], 1 + len(ranks))
        if victim == "rank":
            # Rank 0 alone renames and removes; it is started first.
            return ranks[:1] if is_event else self._rng.sample(ranks, min(1, len(ranks)))
        engines = run.engines()
        return [self._rng.choice(self._rng.choice(engines)).pid] if engines else []

    def _ends_well(self, run: WatchedRun, life: Run, resumed: Path | None) -> bool:
        deadline = time.monotonic() + STALL_LIMIT_S
        while run.runs and time.monotonic() < deadline:
            time.sleep(0.05)
        if run.runs:
            life.problems.append(f"hang: {run.status()}: {run.screen[-1000:]}")
            return False
        orphans = run.wait_until_gone(GONE_LIMIT_S)
        life.problems += [f"orphan: {p.pid} {p.name()}" for p in orphans]
        code = run.wait(GONE_LIMIT_S)
        if code != 0:
            life.problems.append(f"exit code {code}: {run.screen[-2000:]}")
        goes_on = resumed is None or str(resumed) in run.screen
        if not goes_on:
            life.problems.append(f"did not go on from {resumed}: {run.screen[:2000]}")
        return True

    def start(self, run_dir: Path) -> WatchedRun:
        """A run in this layout, or one that goes on."""
        return WatchedRun(
            self._config,
            run_dir,
            LAYOUTS[self.name],
            (*_COMMON, f"trainer.total_steps={self._steps}"),
            niceness=self._niceness,
        )


def _go_first() -> None:
    """This thread, and no other and no run, goes before all that share the processors by turns."""
    os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    sys.setswitchinterval(0.0002)  # The thread that looks at shared memory holds it up no longer.


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # it died with another victim, or ended
        return


def deck_of(
    name: str,
    count: int,
    rng: random.Random,
    *,
    victims: Sequence[str] = VICTIMS,
    moments: Sequence[str] = tuple(MOMENTS),
) -> list[Blow]:
    """So many kills of a layout, every pair of victim and moment about equally often, shuffled."""
    has_engines = "rollout.engine=megatron" not in LAYOUTS[name].overrides
    pairs: list[Blow] = [(v, m) for v in victims if v != "engine" for m in moments]
    if has_engines and "engine" in victims:
        pairs += [("engine", moment) for moment in ENGINE_MOMENTS * 2 if moment in moments]
    if not pairs:
        raise SystemExit(f"layout {name} has no engine process to kill in {', '.join(moments)}")
    deck: list[Blow] = []
    while len(deck) < count:
        rng.shuffle(pairs)
        deck += pairs[: count - len(deck)]
    return deck


def main(arguments: Sequence[str]) -> int:
    """Kills as often as was asked for; 1 if anything differs from the undisturbed runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path, help="new folder for models and runs")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--kills", type=int, default=100, help="over all layouts")
    parser.add_argument("--kills-a-run", type=int, default=10, help="then it may finish")
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS)
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=tuple(MOMENTS))
    parser.add_argument("--steps", type=int, default=6, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nice", type=int, default=0, help="niceness of the runs")
    parser.add_argument(
        "--real-time", action="store_true", help="woken at once, for short moments; as root"
    )
    parser.add_argument("--log", type=Path, help="JSON lines are added to this file")
    parser.add_argument("--table", type=Path, nargs="+", help="only print the table of these logs")
    args = parser.parse_args(arguments)
    if args.table:
        print(table(read(args.table)))
        return 0
    if args.work is None:
        parser.error("--work DIR is needed: a new folder for models and runs")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that runs are ended with it.
    if args.real_time:
        _go_first()
    log = Log(args.log)
    share, rest = divmod(args.kills, len(args.layouts))
    for i, name in enumerate(args.layouts):
        rng = random.Random(f"{args.seed} {name}")
        harness = Harness(
            name, work=args.work, steps=args.steps, rng=rng, log=log, niceness=args.nice
        )
        count = share + (i < rest)
        deck = deck_of(name, count, rng, victims=args.victims, moments=args.moments)
        for number in itertools.count():
            log.add("run", harness.live(number, deck, max_kills=args.kills_a_run))
            if not deck:
                break
    print(table(log.lines))
    return 1 if any(line["problems"] for line in log.lines) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
