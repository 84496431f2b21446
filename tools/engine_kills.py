"""Kills engines, ranks and launchers of tiny training runs at random moments, and compares the end.

    python tools/engine_kills.py --work DIR                           # DP 2, 10 kills of each kind
    python tools/engine_kills.py --work DIR --layouts tp2_rollout2 --kills 3 --json kills.json
    python tools/engine_kills.py --work DIR --targets rank_updating launcher --kills 2

A layout is trained undisturbed once. Then, for each target, a run suffers one kill a step: at a
random moment of the phase a random process of a random engine gets a SIGKILL (or, "hanging", a
SIGSTOP); now and then all engines do. The run must end by itself with exit code 0 and the
undisturbed run's metrics, samples, weights and checkpoint, bit for bit, and leave no process and no
file of an engine behind. A killed rank or launcher must end the run, with all its engines, within a
minute; a signal to the launcher must end it with exit code 75. The same command must then go on to
the same numbers.

What phase a run is in is read from its `status.json`. A kill that came too late for its phase is
no less a kill, but is not counted as one of that phase. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from tests.tiny_run import make_run  # noqa: E402
from tools.kills.runs import (  # noqa: E402
    POLL_S,
    Layout,
    WatchedRun,
    differences,
    restarts,
    timings,
)

LAYOUTS = {
    "dp2": Layout(ranks=2),
    "tp2_rollout2": Layout(ranks=2, overrides=("parallel.tp=2", "rollout.tp=2")),
    "pp2": Layout(ranks=2, overrides=("parallel.pp=2",)),
    "ep2": Layout(ranks=2, overrides=("parallel.ep=2",), family="qwen3_moe"),
}
ENGINE_UNUSED = (
    "score", "sleep", "balance", "log_probs", "ref", "values", "advantages", "update_critic",
    "update_actor",
)  # fmt: skip
ANY = ("generate", *ENGINE_UNUSED, "sync", "validate", "save")
UNTIMED_S = {"start": 15.0, "save": 0.3}
"""Lengths of phases that the metrics do not tell."""
GONE_LIMIT_S = 60.0
"""For every process of a run to end after the kill of a rank or the launcher."""
STOP_LIMIT_S = 600.0
"""For a run to end its step, save and end after SIGTERM or SIGINT."""
START_S = 8.0
"""Within it a process is killed once more, or the run is stopped, while an engine starts again."""
RUN_LIMIT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Target:
    """Whom to kill, and when."""

    phases: tuple[str, ...]
    """of `status.json`, in their order"""
    victim: str = "engine"
    """`engine`, `rank` or `launcher`"""
    number: signal.Signals = signal.SIGKILL
    overrides: tuple[str, ...] = ()
    restarting: bool = False
    """An engine is killed first; the victim follows while that starts again."""

    @property
    def stops(self) -> bool:
        """Whether the run is asked to end, and not killed."""
        return self.number in (signal.SIGTERM, signal.SIGINT)


TARGETS = {
    "generating": Target(phases=("generate",)),
    "syncing": Target(phases=("sync",)),
    "idle": Target(phases=ENGINE_UNUSED),
    "asleep": Target(phases=ENGINE_UNUSED[2:], overrides=("rollout.sleep=true",)),
    "validating": Target(phases=("validate",)),
    "hanging": Target(
        phases=("generate",), number=signal.SIGSTOP, overrides=("rollout.timeout_s=15",)
    ),
    "restarting": Target(phases=("generate",), restarting=True),
    "rank_starting": Target(phases=("start",), victim="rank"),
    "rank_generating": Target(phases=("generate",), victim="rank"),
    "rank_updating": Target(phases=("update_critic", "update_actor"), victim="rank"),
    "rank_syncing": Target(phases=("sync",), victim="rank"),
    "rank_saving": Target(phases=("save",), victim="rank"),
    "rank_restarting": Target(phases=("generate",), victim="rank", restarting=True),
    "launcher": Target(phases=ANY, victim="launcher"),
    "sigterm": Target(phases=ANY, victim="launcher", number=signal.SIGTERM),
    "sigint": Target(phases=ANY, victim="launcher", number=signal.SIGINT),
    "sigterm_restarting": Target(
        phases=("generate",), victim="launcher", number=signal.SIGTERM, restarting=True
    ),
}


@dataclass(kw_only=True)
class Outcome:
    """One row of the table: all kills of one kind in one layout."""

    layout: str
    target: str
    kills: int = 0
    in_phase: int = 0
    """kills of the target itself after which the run was still in the wanted phase"""
    restarts: int = 0
    exit_codes: list[int] = field(default_factory=list)
    slowest_end_s: float = 0.0
    """from the kill of a rank or launcher to the end of the last process"""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Harness:
    """One layout: its model, its undisturbed run, and the runs that are disturbed."""

    def __init__(self, name: str, *, work: Path, steps: int, rng: random.Random) -> None:
        self.name, self.layout = name, LAYOUTS[name]
        self._folder = work / name
        self._steps = steps
        self._rng = rng
        self._config = self._folder / "run.yaml"
        if not self._config.exists():
            make_run(self._folder, family=self.layout.family, tie_word_embeddings=False)
        self._undisturbed = self._folder / f"undisturbed_{steps}"
        if not (self._undisturbed / "actor_hf").exists():
            code = self._start(self._undisturbed).wait(RUN_LIMIT_S)
            assert code == 0, f"{self._undisturbed} ended with {code}: see its screen and logs"
        self._timings = timings(self._undisturbed)

    def kill_engines(self, target_name: str, count: int) -> Outcome:
        """One run with up to `count` kills of engines in the wanted phases."""
        outcome, started = Outcome(layout=self.name, target=target_name), time.monotonic()
        target = TARGETS[target_name]
        run = self._start(self._folder / target_name, *target.overrides)
        try:
            self._disturb(run, target, outcome, count)
            outcome.exit_codes.append(run.wait(RUN_LIMIT_S))
            orphans = run.wait_until_gone(GONE_LIMIT_S)
        finally:
            run.end()
        outcome.problems += [f"orphan: {p.pid} {p.name()}" for p in orphans]
        outcome.problems += [f"left behind: {name}" for name in run.leftovers()]
        self._check_end(run, outcome)
        if outcome.exit_codes == [0]:
            outcome.restarts = len(restarts(run.run_dir))
        outcome.seconds = time.monotonic() - started
        return outcome

    def kill_run(self, target_name: str, count: int) -> Outcome:
        """`count` runs that end with a rank or the launcher, and are started again."""
        outcome, started = Outcome(layout=self.name, target=target_name), time.monotonic()
        target = TARGETS[target_name]
        for number in range(count):
            run_dir = self._folder / f"{target_name}_{number}"
            run = self._start(run_dir)
            try:
                self._disturb(run, target, outcome, 1)
                killed_at = time.monotonic()
                orphans = run.wait_until_gone(STOP_LIMIT_S if target.stops else GONE_LIMIT_S)
            finally:
                run.end()
            outcome.slowest_end_s = max(outcome.slowest_end_s, time.monotonic() - killed_at)
            code = run.wait(RUN_LIMIT_S)
            outcome.exit_codes.append(code)
            outcome.problems += [f"orphan: {p.pid} {p.name()}" for p in orphans]
            if (code == 75) != target.stops or code == 0:
                outcome.problems.append(f"exit code {code}: {run.screen[-1000:]}")
            again = self._start(run_dir)
            code = again.wait(RUN_LIMIT_S)
            again.end()
            outcome.exit_codes.append(code)
            self._check_end(again, outcome)
        outcome.seconds = time.monotonic() - started
        return outcome

    def _start(self, run_dir: Path, *overrides: str) -> WatchedRun:
        """As many steps as kills and some more, a validation after each, small buckets."""
        return WatchedRun(
            self._config,
            run_dir,
            self.layout,
            (
                f"trainer.total_steps={self._steps}", "trainer.test_freq=1", "trainer.save_freq=3",
                "checkpoint.keep=2", "rollout.max_response_length=24",
                "rollout.max_restarts=1000", "rollout.sync_bucket_bytes=20000", *overrides,
            ),
        )  # fmt: skip

    def _disturb(self, run: WatchedRun, target: Target, outcome: Outcome, count: int) -> None:
        """Kills until `count` of them came in time, or the last step but one has passed."""
        hits, last, seen = 0, -1, ""
        first = self._rng.randint(2, 4) if target.victim != "engine" else 1
        if "start" in target.phases:
            first = 0
        victims: list[psutil.Process] = []
        while run.runs and hits < count:
            time.sleep(POLL_S)
            step, phase = run.status()
            if phase not in target.phases and phase != seen:
                # Before it counts: to look for processes takes longer than a phase of a tiny model.
                victims = self._victims(run, target)
            seen = phase
            if phase not in target.phases or step <= last or step < first:
                continue
            if step == self._steps and target.victim == "engine":
                return
            last = step
            lengths = {**self._timings, **UNTIMED_S}
            delay = self._rng.uniform(0.0, 0.9 * sum(lengths[name] for name in target.phases))
            time.sleep(delay)
            if target.restarting:
                self._kill_an_engine_first(run)
                outcome.kills += target.victim == "engine"
                victims = []
            victims = victims or self._victims(run, target)
            if not victims:
                last = step - 1
                continue
            for process in victims:
                process.send_signal(target.number)
            in_time = run.status()[1] in target.phases
            hits += in_time
            outcome.kills += len(victims)
            outcome.in_phase += len(victims) * in_time
            names = ", ".join(str(process.pid) for process in victims)
            print(f"  {self.name} step {step} {phase} +{delay:.3f} s: {names}", flush=True)
            if target.victim != "engine":
                return

    def _kill_an_engine_first(self, run: WatchedRun) -> None:
        self._rng.choice(self._rng.choice(run.engines())).kill()
        time.sleep(self._rng.uniform(0.5, START_S))

    def _victims(self, run: WatchedRun, target: Target) -> list[psutil.Process]:
        """Whom the next signal goes to; nobody yet while ranks and engines start."""
        if target.victim == "launcher":
            return [psutil.Process(run.launcher.pid)]
        if target.victim == "rank":
            return self._rng.sample(ranks, 1) if (ranks := run.ranks()) else []
        engines = run.engines()
        hit = (
            engines if self._rng.random() < 0.2 else self._rng.sample(engines, min(1, len(engines)))
        )
        return [self._rng.choice(engine) for engine in hit]

    def _check_end(self, run: WatchedRun, outcome: Outcome) -> None:
        if outcome.exit_codes[-1] != 0:
            outcome.problems.append(f"exit code {outcome.exit_codes[-1]}: {run.screen[-2000:]}")
            return
        outcome.problems += differences(run.run_dir, self._undisturbed)


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes in Markdown."""
    lines = [
        "| layout | target | kills | in phase | restarts | exit codes | all gone after | equal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for o in outcomes:
        codes = ", ".join(str(code) for code in sorted(set(o.exit_codes)))
        gone = f"{o.slowest_end_s:.0f} s" if o.slowest_end_s else ""
        equal = "yes" if not o.problems else "NO: " + "; ".join(o.problems)[:300]
        lines.append(
            f"| {o.layout} | {o.target} | {o.kills} | {o.in_phase} | {o.restarts or ''} | {codes} "
            f"| {gone} | {equal} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Runs the chosen layouts and targets; 1 if any differs from its undisturbed run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for models and runs")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["dp2"])
    engine_targets = [name for name, target in TARGETS.items() if target.victim == "engine"]
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=engine_targets)
    parser.add_argument("--kills", type=int, default=10, help="of each target, in each layout")
    parser.add_argument("--spare-steps", type=int, default=4, help="for kills that come too late")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="adds the outcomes to this file")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that runs are ended with it.
    outcomes = []
    for name in args.layouts:
        rng = random.Random(f"{args.seed} {name} {args.targets}")
        harness = Harness(name, work=args.work, steps=args.kills + args.spare_steps, rng=rng)
        for target in args.targets:
            kill = harness.kill_engines if TARGETS[target].victim == "engine" else harness.kill_run
            outcomes.append(kill(target, args.kills))
            if args.json:
                before = json.loads(args.json.read_text()) if args.json.exists() else []
                args.json.write_text(json.dumps([*before, asdict(outcomes[-1])], indent=1) + "\n")
    print(table(outcomes))
    return 1 if any(outcome.problems for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
