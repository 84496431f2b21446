"""Time of a weight push into a running engine, against a plain copy of the same bytes.

    python -m tools.bench.sync                       # 10M and 135M parameters, float32, CPU
    python -m tools.bench.sync --sizes 500M --json out.json

A push writes every byte twice, into shared memory and from there into the engine's parameters, and
reads it once to refuse NaN; so two copies are the least that can be hoped for. Each round times one
copy of all tensors into buffers that exist already and then one push, as a run makes it after its
first (without checksums, with the flush of the cache). Left out: gathering over TP and PP, which a
run adds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

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
    verified_push_s: float
    """Of the one push with checksums."""

    @property
    def ratio(self) -> float:
        """Push over copy."""
        return self.push_s / self.copy_s


def measure(size: str, *, bucket_bytes: int, rounds: int) -> Result:
    """Starts an engine of this size and pushes into it."""
    with tempfile.TemporaryDirectory() as name:
        folder = make_random_model(Path(name) / "model", size)
        weights = {
            key: tensor.clone() for key, tensor in load_file(folder / "model.safetensors").items()
        }
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
            return _measure(engine, size, weights, rounds)


def _measure(
    engine: SGLangEngine, size: str, weights: dict[str, torch.Tensor], rounds: int
) -> Result:
    targets = {name: torch.empty_like(tensor) for name, tensor in weights.items()}

    def push() -> float:
        version = engine.weight_version + 1
        start = time.perf_counter()
        engine.update_weights(weights.items(), expected_names=set(weights), version=version)
        return time.perf_counter() - start

    verified = push()
    copies, pushes = [], []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for name, tensor in weights.items():
            targets[name].copy_(tensor)
        copies.append(time.perf_counter() - start)
        pushes.append(push())
    return Result(
        size=size,
        num_tensors=len(weights),
        num_bytes=sum(tensor.nbytes for tensor in weights.values()),
        bucket_bytes=engine.settings.bucket_bytes,
        copy_s=statistics.median(copies[1:]),  # the first touches the buffers' pages
        push_s=statistics.median(pushes[1:]),
        verified_push_s=verified,
    )


def table(results: Sequence[Result]) -> str:
    """Markdown."""
    lines = [
        "| parameters | tensors | bytes | bucket | plain copy | push | push / copy "
        "| push with checksums |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r.size} | {r.num_tensors} | {r.num_bytes / 1e6:.0f} MB | {r.bucket_bytes >> 20} MiB "
        f"| {r.copy_s * 1e3:.0f} ms | {r.push_s * 1e3:.0f} ms | {r.ratio:.2f} "
        f"| {r.verified_push_s * 1e3:.0f} ms |"
        for r in results
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["10M", "135M"])
    parser.add_argument("--rounds", type=int, default=9)
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
        rows = [{**dataclasses.asdict(r), "ratio": r.ratio} for r in results]
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
