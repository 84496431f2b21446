"""What saving costs a training step: without saves, with saves in line, and in the background.

    python tools/bench/save.py [--size 10M] [--ranks 2] [--steps 12] [--json out.json]

Real gloo ranks update actor and critic of a random model on fixed samples; there is no generation,
so a step is shorter than a real one and the share of saving larger. Blocked is the time for which a
rank does not train: the copy to host memory, and in line the writing too. In the background the
writing takes processor time from the steps beside it, which shows in their time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

CONFIG = """\
model: {{path: "{model}", dtype: float32}}
data: {{train_files: ["unused"], max_prompt_length: 64}}
rollout: {{max_response_length: 64}}
trainer: {{test_freq: 0, val_before_train: false}}
"""
SAMPLES, RESPONSE = 8, 64
"""Responses a step over all ranks, and tokens of each."""
MODES = ("none", "in line", "background")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One rank's steps in one mode."""

    rank: int
    mode: str
    num_saves: int
    gb: float
    """of one checkpoint, all ranks"""
    update_s: float
    """of an update, on average"""
    blocked_s: float
    """of a save, on average"""
    write_s: float
    """from the copy to the last file, on average"""
    total_s: float
    """all steps, their saves and the wait for the last one"""


def measure(arguments: argparse.Namespace) -> list[Measured]:
    """All modes on this rank. Collective over the world."""
    from megappo.config import load
    from megappo.distributed import parallel
    from megappo.models.spec import load_spec
    from megappo.trainer.build import build_roles

    config = load(arguments.worker / "run.yaml")
    launch = parallel.LaunchEnvironment.read()
    context = parallel.start(launch, parallel.Degrees(), device="cpu", seed=1, timeout_s=600.0)
    spec = load_spec(config.model.path)
    specs = dict.fromkeys(("actor", "critic", "reference"), spec)
    actor, critic, _ = build_roles(config, specs, context, total_optimizer_steps=1000)
    mini = make_mini_batch(spec.vocab_size, SAMPLES // context.dp)
    update(actor, critic, mini)  # makes the moments
    found = [run(mode, actor, critic, mini, context, arguments) for mode in MODES]
    parallel.stop(context)
    return found


def run(
    mode: str, actor: Any, critic: Any, mini: Any, context: Any, arguments: argparse.Namespace
) -> Measured:
    """Some steps with saves in one mode. Collective over the world."""
    from megappo.checkpoint.layout import KeepPolicy
    from megappo.checkpoint.store import CheckpointStore
    from megappo.config.sections import CheckpointSection
    from megappo.trainer.saver import Saver

    events: list[dict[str, Any]] = []
    saver = Saver(
        store=CheckpointStore(
            folder=arguments.worker / mode.replace(" ", "_"),
            policy=KeepPolicy(newest=1),
            context=context,
        ),
        settings=CheckpointSection(async_save=mode == "background", on_failure="stop"),
        models={"actor": actor.trainable, "critic": critic.trainable},
        context=context,
        ranks_on_node=context.world_size,
        save_freq=0 if mode == "none" else arguments.save_freq,
        state=dict,
        say=print,
        event=lambda kind, step, **details: events.append({"kind": kind, **details}),
    )
    if mode != "none":  # imports, and memory that is taken for the first time
        saver.save_now(0)
        saver.take_metrics()
        events.clear()
    started = time.perf_counter()
    updates = 0.0
    for step in range(1, arguments.steps + 1):
        before = time.perf_counter()
        update(actor, critic, mini)
        updates += time.perf_counter() - before
        saver.after_step(step, val_score=None)
    blocked = saver.take_metrics()["timing_s/save"]
    saver.finish()
    total = time.perf_counter() - started
    saves = [event for event in events if event["kind"] == "saved"]
    count = max(1, len(saves))
    return Measured(
        rank=context.rank,
        mode=mode,
        num_saves=len(saves),
        gb=max((event["gb"] for event in saves), default=0.0),
        update_s=updates / arguments.steps,
        blocked_s=blocked / count,
        write_s=sum(event["write_s"] for event in saves) / count,
        total_s=total,
    )


def make_mini_batch(vocab_size: int, count: int) -> Any:
    """Fixed samples of this rank, with everything that an update reads."""
    from megappo.types import Completion, MiniBatch, Prompt, collate

    generator = torch.Generator().manual_seed(1)

    def ids() -> tuple[int, ...]:
        return tuple(torch.randint(3, vocab_size, (RESPONSE,), generator=generator).tolist())

    prompts = [
        Prompt(row=i, token_ids=ids(), data_source="", ground_truth="", extra_info={})
        for i in range(count)
    ]
    answers = [
        Completion(token_ids=ids(), log_probs=(-1.0,) * RESPONSE, finish_reason="stop", text="")
        for _ in range(count)
    ]
    batch = collate(prompts, answers)
    made_up = torch.randn(batch.responses.shape, generator=generator)
    batch = batch.with_fields(
        old_log_probs=batch.rollout_log_probs,
        ref_log_probs=batch.rollout_log_probs,
        values=made_up,
        returns=made_up + 1,
        advantages=made_up,
    )
    return MiniBatch(samples=batch, micro_batches=tuple((i,) for i in range(count)))


def update(actor: Any, critic: Any, mini: Any) -> None:
    """One optimizer step of both models. Collective over the world."""
    from megappo.distributed.metrics import Tally

    critic.update(mini, Tally())
    actor.update(mini, Tally(), is_first=False)


def launch_ranks(arguments: argparse.Namespace) -> list[Measured]:
    """Runs `measure` on real ranks of this machine; the results of all."""
    from tools.bench.random_model import make_random_model

    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        model = make_random_model(folder / "model", arguments.size)
        (folder / "run.yaml").write_text(CONFIG.format(model=model))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(arguments.ranks), __file__, "--worker", name]
        command += ["--steps", str(arguments.steps), "--save-freq", str(arguments.save_freq)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}")
        files = sorted(folder.glob("measured_*.json"))
        return [Measured(**row) for file in files for row in json.loads(file.read_text())]


def table(results: Sequence[Measured]) -> str:
    """Markdown; of each mode the rank that took longest."""
    lines = [
        "| saves | checkpoint | update | blocked a save | in updates | written after | all steps |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    slowest = [max((m for m in results if m.mode == mode), key=lambda m: m.total_s)
               for mode in MODES]  # fmt: skip
    plain = slowest[0].update_s
    for m in slowest:
        lines.append(
            f"| {m.mode} | {m.gb:.3f} GiB | {m.update_s:.2f} s | {m.blocked_s:.2f} s "
            f"| {m.blocked_s / plain:.2f} | {m.write_s:.2f} s | {m.total_s:.1f} s |"
        )
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="10M", help="of tools/bench/random_model.py")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12, help="of each mode")
    parser.add_argument("--save-freq", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    arguments = parse(argv)
    if arguments.worker:
        rows = [dataclasses.asdict(m) for m in measure(arguments)]
        path = arguments.worker / f"measured_{rows[0]['rank']:03d}.json"
        path.write_text(json.dumps(rows))
        return
    results = launch_ranks(arguments)
    print(table(results))
    if arguments.json:
        rows = [dataclasses.asdict(m) for m in results]
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))  # for tools.bench, started by its path
    main()
