"""One torchrun rank with gloo and an engine, which generates and takes weights between collectives.

Usage: torchrun --nproc-per-node 2 torchrun_worker.py MODEL FOLDER. Writes FOLDER/rank_R.json. At
the end rank 1's engine is killed, and its model folder is gone.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import prompt_of_row, settings_for
from safetensors.torch import load_file

from megappo.distributed import parallel
from megappo.distributed.parallel import Degrees, LaunchEnvironment, ParallelContext
from megappo.rollout.engine import GenerationRequest
from megappo.rollout.placement import Placement
from megappo.rollout.recovery import EngineKeeper, EnginesLost
from megappo.rollout.sampling import SamplingSettings
from megappo.rollout.sglang_engine import SGLangEngine
from megappo.rollout.worker import RolloutWorker
from megappo.types import PromptBatch

ROWS = range(4)
SAMPLING = SamplingSettings(max_new_tokens=8, ignore_eos=True)

Samples = list[tuple[int, list[int]]]
"""Row and tokens of each sample."""


def main() -> None:
    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    launch = LaunchEnvironment.read()
    # As in a run, what is said about a failed engine is not for the screen.
    logging.basicConfig(filename=folder / f"rank_{launch.rank}.log")
    context = parallel.start(launch, Degrees(), device="cpu", seed=1, timeout_s=900)
    rank = launch.rank
    weights = load_file(model / "model.safetensors")
    settings = settings_for(model, folder / f"engine_{rank}.log", local_rank=rank)
    starts: list[SGLangEngine] = []

    def start() -> SGLangEngine:
        gone = {"model_path": folder / "gone"} if starts else {}
        starts.append(SGLangEngine(dataclasses.replace(settings, **gone)))
        return starts[-1]

    keeper = EngineKeeper(
        start, context=context, weights={k: w.shape for k, w in weights.items()}, max_restarts=2
    )
    facts: dict[str, object] = {"rank_variable": os.environ["RANK"]}
    try:
        facts |= between_collectives(starts[0], weights, rank)
        facts |= layouts(keeper, context)
        facts |= death(keeper, weights, starts[0], rank)
    finally:
        keeper.shutdown()
    (folder / f"rank_{rank}.json").write_text(json.dumps(facts))
    parallel.stop(context)


def between_collectives(
    engine: SGLangEngine, weights: Mapping[str, torch.Tensor], rank: int
) -> dict[str, object]:
    requests = [
        GenerationRequest(token_ids=(40, 50 + i), seed=i, sampling=SAMPLING) for i in range(8)
    ]
    answers, sums = [], []
    for step in range(2):
        answers.append([c.token_ids for c in engine.generate(requests)])
        total = torch.tensor([float(rank + 1)])
        dist.all_reduce(total)
        sums.append(total.item())
        engine.update_weights(weights.items(), expected_names=set(weights), version=step + 1)
    return {"answers": answers, "sums": sums}


def layouts(keeper: EngineKeeper, context: ParallelContext) -> dict[str, object]:
    """The same prompts as the ranks of DP 2 and TP 2, and as one rank alone, draw them."""
    alone = parallel.group_of(context.rank, [[0], [1]], timeout_s=900)
    pair = dataclasses.replace(
        context, tp=2, dp=1, tp_rank=context.rank, dp_rank=0, model_group=context.world_group
    )
    single = dataclasses.replace(
        context, rank=0, world_size=1, dp=1, dp_rank=0, world_group=alone, model_group=alone
    )
    found = {
        "dp2": samples(keeper, context, alone, ROWS[2 * context.rank : 2 * context.rank + 2], 1),
        "tp2": samples(keeper, pair, context.world_group, ROWS, 1),
        "next_step": samples(keeper, pair, context.world_group, ROWS, 2),
    }
    # No collective over the world from here on: each rank is a run of its own.
    keeper._context = single
    found["one_rank"] = samples(keeper, single, alone, ROWS, 1)
    keeper._context = context
    return found


def samples(
    keeper: EngineKeeper, context: ParallelContext, group: object, rows: range, step: int
) -> Samples:
    size = dist.get_world_size(group)  # type: ignore[arg-type]
    members = tuple(range(size)) if size > 1 else (context.rank,)
    worker = RolloutWorker(
        engine=keeper,
        placement=Placement(
            rank=context.rank,
            owner_ranks=frozenset(range(context.world_size)),
            members=members,
            group=group,
        ),
        context=context,
        seed=5,
        n=4,
        sampling=SAMPLING,
        sleeps=False,
    )
    batch = worker.generate(
        PromptBatch(epoch=0, prompts=tuple(map(prompt_of_row, rows))), step=step
    )
    return [
        (prompt.row, list(completion.token_ids))
        for prompt, completion in zip(batch.prompts, batch.completions, strict=True)
    ]


def death(
    keeper: EngineKeeper, weights: Mapping[str, torch.Tensor], engine: SGLangEngine, rank: int
) -> dict[str, object]:
    """Rank 1's engine is killed and never starts again."""

    @contextmanager
    def source() -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        yield iter(weights.items())

    assert keeper.push(source, version=3) is not None
    if rank == 1:
        os.kill(engine.pids[0], signal.SIGKILL)
    request = GenerationRequest(token_ids=(40, 50), seed=0, sampling=SAMPLING)
    try:
        keeper.generate([request])
    except EnginesLost as error:
        restarts = keeper.take_incidents().restarts
        return {"lost": str(error), "restarts": [(r.rank, r.reason) for r in restarts]}
    return {"lost": "never", "restarts": []}


if __name__ == "__main__":
    main()
