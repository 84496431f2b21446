"""Control traffic and time a step on 2, 4, 8 and 16 gloo ranks of a tiny model, data parallel.

    python -m tools.bench.ranks [--ranks 2 4 8 16] [--json]

The work a rank is the same everywhere (4 prompts, 2 responses each). Runs are real ones: the
program of `megappo.train` on each rank, with the in-process engine. Before it starts, torch's
collectives are wrapped, and each call's bytes are counted on each rank: what it hands in, and what
it gets out. A call from Megatron's data-parallel buffers or its distributed optimizer with a whole
bucket (`reduce_scatter`, `all_gather`) is gradient or parameter traffic; every other one is
control: metrics, lengths, agreements, samples that change their rank, gradient norms.

Not counted: how often gloo passes a byte on inside a collective, and the watchdog's words to
torchrun's store, which are not collectives.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STEPS = 3  # the first one is warm-up
PROMPTS_A_RANK = 4

# Name -> positions of (what is handed in, what comes out); one tensor for both is counted as both.
COLLECTIVES = {
    "all_reduce": (0, 0),
    "reduce": (0, 0),
    "broadcast": (0, 0),
    "all_gather": (1, 0),
    "gather": (0, 1),
    "scatter": (1, 0),
    "all_gather_into_tensor": (1, 0),
    "_all_gather_base": (1, 0),
    "reduce_scatter": (1, 0),
    "reduce_scatter_tensor": (1, 0),
    "_reduce_scatter_base": (1, 0),
    "all_to_all": (1, 0),
    "all_to_all_single": (1, 0),
    "send": (0, None),
    "isend": (0, None),
    "recv": (None, 0),
    "irecv": (None, 0),
}
BUCKETS = ("megatron/core/distributed/", "megatron/core/optimizer/distrib_optimizer")


def count_collectives(counts: dict[str, float]) -> None:
    """Wraps torch's collectives of this process; `counts` grows with each call."""
    import torch.distributed.distributed_c10d as c10d
    from torch import distributed

    for name, (given, taken) in COLLECTIVES.items():
        wrapped = _counted(name, getattr(c10d, name), given, taken, counts)
        setattr(c10d, name, wrapped)
        setattr(distributed, name, wrapped)


def _counted(
    name: str,
    call: Callable[..., Any],
    given: int | None,
    taken: int | None,
    counts: dict[str, float],
) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        tensors = [*args, *kwargs.values()]
        outer = not counts["inside"]
        if outer:
            bucket = ("gather" in name or "scatter" in name) and _from_buckets()
            kind = "buckets" if bucket else "control"
            counts[f"{kind}/calls"] += 1
            counts[f"{kind}/given"] += 0 if given is None else _bytes(tensors, given)
            counts[f"{kind}/taken"] += 0 if taken is None else _bytes(tensors, taken)
        counts["inside"] += 1  # torch's own collectives call one another
        try:
            return call(*args, **kwargs)
        finally:
            counts["inside"] -= 1

    return counted


def _bytes(tensors: Sequence[Any], position: int) -> int:
    """Of a tensor, or of a list of them."""
    value = tensors[position] if position < len(tensors) else None
    parts = value if isinstance(value, list | tuple) else [value]
    return sum(part.numel() * part.element_size() for part in parts if hasattr(part, "numel"))


def _from_buckets() -> bool:
    frame = sys._getframe(2)
    for _ in range(4):
        if any(part in frame.f_code.co_filename for part in BUCKETS):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def rank_main(arguments: Sequence[str]) -> int:
    """One rank: counts while a run goes on, and writes what each step took."""
    out, config, *overrides = arguments
    counts: dict[str, float] = defaultdict(float)
    count_collectives(counts)
    return run_counted(Path(out), config, overrides, counts)


def run_counted(
    out: Path, config: str, overrides: Sequence[str], counts: Mapping[str, float]
) -> int:
    """One rank of a run, whose collectives are counted already; the run's exit code."""
    from megappo import train
    from megappo.trainer.ppo_trainer import PPOTrainer

    starts: list[dict[str, float]] = []
    step = PPOTrainer.step

    def counted_step(self: PPOTrainer, **kwargs: Any) -> Mapping[str, float]:
        starts.append(dict(counts))
        return step(self, **kwargs)

    PPOTrainer.step = counted_step  # type: ignore[method-assign]
    code = train.main([config, *overrides])
    (out / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(starts))
    return code


def overrides_of(num_ranks: int, out: Path) -> list[str]:
    """Of the config of `tests.tiny_run`: as much work a rank, whatever their number."""
    prompts = PROMPTS_A_RANK * num_ranks
    return [
        f"trainer.run_dir={out / 'run'}", f"trainer.total_steps={STEPS}",
        f"data.train_batch_size={prompts}", f"actor.mini_batch_size={prompts}",
        "actor.micro_batch_size=8", "critic.micro_batch_size=8", "rollout.n=2",
        "rollout.engine=megatron", "trainer.test_freq=0", "trainer.val_before_train=false",
        "trainer.save_freq=0", "checkpoint.export_hf=false", "guard.check_ranks_every=0",
        "loggers=[jsonl]", "trainer.rollouts_per_step=0",
    ]  # fmt: skip


def measure(num_ranks: int, folder: Path) -> dict[str, float]:
    """One run; figures of the second step (from its start to the next one's) a rank."""
    out = folder / f"ranks_{num_ranks}"
    out.mkdir()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(num_ranks), "-m", "tools.bench.ranks", "--rank", str(out), str(folder / "run.yaml"),
        *overrides_of(num_ranks, out),
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return figures(num_ranks, out)


def figures(num_ranks: int, out: Path) -> dict[str, float]:
    """The largest of all ranks' counts of the second step, and its time."""
    deltas = []
    for rank in range(num_ranks):
        starts = json.loads((out / f"rank_{rank}.json").read_text())
        assert len(starts) == STEPS, starts
        deltas.append({key: starts[2][key] - starts[1].get(key, 0) for key in starts[2]})
    rows = [json.loads(line) for line in (out / "run" / "metrics.jsonl").open()]
    worst = {key: max(delta[key] for delta in deltas) for key in deltas[0] if key != "inside"}
    return {"ranks": num_ranks, **worst, "seconds": rows[1]["timing_s/step"]}


def main() -> None:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    from tests.tiny_run import make_run

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_run(folder, tie_word_embeddings=False)
        rows = [measure(num_ranks, folder) for num_ranks in args.ranks]
    if args.json:
        print(json.dumps(rows))
        return
    print(
        "| ranks | control, given | control, taken | calls | buckets, given | buckets, taken | s |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row['ranks']:.0f} | {row['control/given']:,.0f} B | {row['control/taken']:,.0f} B "
            f"| {row['control/calls']:.0f} | {row['buckets/given']:,.0f} B "
            f"| {row['buckets/taken']:,.0f} B | {row['seconds']:.2f} |"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        sys.exit(rank_main(sys.argv[2:]))
    main()
