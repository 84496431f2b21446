"""Time of a weight push into a running engine, against a plain copy of the same bytes.

    python -m tools.bench.sync                       # 10M and 135M parameters, float32, CPU
    python -m tools.bench.sync --sizes 500M --json out.json

The plain copy is one `copy_` of all weights, which lie in one piece of memory, into another piece
whose pages exist already, on one thread. Each round times one of these and then one push, as a run
makes it after its first (without checksums, with the flush of the cache), also on one thread a
process. A push writes every byte twice, into shared memory and from there into the engine's
parameters, and looks for NaN; so two copies are the least where the engine cannot load one bucket
while the next is packed. Left out: gathering over TP and PP, which a run adds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from megappo.config.sections import RolloutSection
from megappo.rollout.sglang_engine import EngineSettings, SGLangEngine
from tools.bench.random_model import SHAPES, make_random_model


@dataclass(frozen=True, kw_only=True)
class Result:
    """Medians over the rounds of one size."""

    size: str
    num_tensors: int
    num_bytes: int
    bucket_bytes: int
    copy_s: float
    push_s: float
    ratio: float
    """Push over copy, of each round."""
    verified_push_s: float
    """Of the one push with checksums."""
    load: float
    """Processes that wanted to run on this machine, over the last minute, at the end."""


def measure(size: str, *, bucket_bytes: int, rounds: int) -> Result:
    """Starts an engine of this size and pushes into it."""
    with tempfile.TemporaryDirectory() as name:
        folder = make_random_model(Path(name) / "model", size)
        memory, weights = in_one_piece(load_file(folder / "model.safetensors"))
        settings = EngineSettings(
            model_path=folder,
            log_file=Path(name) / "engine.log",
            context_length=256,
            device="cpu",
            dtype="float32",
            max_running_requests=8,
            bucket_bytes=bucket_bytes,
            verify_sync="first",
        )
        with SGLangEngine(settings) as engine:
            return measure_engine(engine, size, memory, weights, rounds)


def in_one_piece(weights: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Memory that holds copies of all tensors, which have one dtype; and the copies, its views."""
    memory = torch.cat([tensor.reshape(-1) for tensor in weights.values()])
    parts = memory.split([tensor.numel() for tensor in weights.values()])
    named = zip(weights.items(), parts, strict=True)
    return memory, {name: part.view(tensor.shape) for (name, tensor), part in named}


def measure_engine(
    engine: SGLangEngine, size: str, memory: Tensor, weights: dict[str, Tensor], rounds: int
) -> Result:
    """Pushes into an engine; one round of warm-up is not counted."""
    target = torch.empty_like(memory)

    def push() -> float:
        version = engine.weight_version + 1
        start = time.perf_counter()
        engine.update_weights(weights.items(), expected_names=set(weights), version=version)
        return time.perf_counter() - start

    verified = push()
    copies, pushes = [], []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        target.copy_(memory)
        copies.append(time.perf_counter() - start)
        pushes.append(push())
    del copies[0], pushes[0]  # the first copy touches the target's pages
    return Result(
        size=size,
        num_tensors=len(weights),
        num_bytes=memory.nbytes,
        bucket_bytes=engine.settings.bucket_bytes,
        copy_s=statistics.median(copies),
        push_s=statistics.median(pushes),
        ratio=statistics.median(push / copy for push, copy in zip(pushes, copies, strict=True)),
        verified_push_s=verified,
        load=os.getloadavg()[0],
    )


def table(results: Sequence[Result]) -> str:
    """Markdown."""
    lines = [
        "| parameters | tensors | bytes | bucket | plain copy | push | push / copy "
        "| push with checksums | load |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r.size} | {r.num_tensors} | {r.num_bytes / 1e6:.0f} MB | {r.bucket_bytes >> 20} MiB "
        f"| {r.copy_s * 1e3:.1f} ms | {r.push_s * 1e3:.1f} ms | {r.ratio:.2f} "
        f"| {r.verified_push_s * 1e3:.0f} ms | {r.load:.1f} |"
        for r in results
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["10M", "135M"])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument(
        "--bucket-bytes", type=int, default=RolloutSection().sync_bucket_bytes, help="as in a run"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    results = [
        measure(size, bucket_bytes=arguments.bucket_bytes, rounds=arguments.rounds)
        for size in arguments.sizes
    ]
    print(table(results))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(r) for r in results], indent=1))


if __name__ == "__main__":
    main()
