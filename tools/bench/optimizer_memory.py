"""Bytes of optimizer state a rank, for 1, 2 and 4 data-parallel ranks: they fall as 1/DP.

    python tools/bench/optimizer_memory.py [--dtype bfloat16] [--json out.json]

Each run starts real gloo ranks with a small random model, takes one optimizer step, which makes the
moments, and sums what Megatron's DistributedOptimizer then holds on each rank beyond weights and
gradients: two float32 moments of its share of the parameters and, for bfloat16 weights, their
float32 copy. Weights and gradients are shown beside it: they do not fall, every rank has all.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HIDDEN, LAYERS, VOCAB = 128, 4, 4096
MODEL_CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 3 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One rank's memory after an optimizer step."""

    rank: int
    parameters: int
    """Elements of the model."""
    params_bytes: int
    grads_bytes: int
    optimizer_bytes: int


def measure(dtype: str) -> Measured:
    """One optimizer step of this rank. Collective over the world."""
    from megappo.config.learning import OptimizerSection
    from megappo.distributed import parallel
    from megappo.distributed.grad_sync import make_trainable

    launch = parallel.LaunchEnvironment.read()
    context = parallel.start(launch, parallel.Degrees(), device="cpu", seed=1, timeout_s=120.0)
    chunk, settings = build_model(DTYPES[dtype])
    trainable = make_trainable(
        "model", [chunk], settings, optim=OptimizerSection(), total_optimizer_steps=1
    )
    trainable.zero_grad()
    for parameter in chunk.parameters():
        parameter.main_grad.normal_()
    wrapped = trainable.chunks[0]
    wrapped.start_grad_sync()
    trainable.step()
    memory = trainable.memory
    assert memory is not None
    found = Measured(
        rank=context.rank,
        parameters=sum(p.numel() for p in chunk.parameters()),
        params_bytes=memory.part_bytes("params"),
        grads_bytes=memory.part_bytes("grads"),
        optimizer_bytes=memory.part_bytes("optimizer"),
    )
    parallel.stop(context)
    return found


def build_model(dtype: torch.dtype) -> tuple[torch.nn.Module, Any]:
    """A random model of one stage, and Megatron's config of it."""
    from megappo.models.build import build_chunk, transformer_config
    from megappo.models.spec import spec_from_config

    spec = spec_from_config(MODEL_CONFIG)
    settings = transformer_config(spec, tp=1, pp=1, dtype=dtype)
    chunk = build_chunk(spec, settings, head="lm", pre_process=True, post_process=True)
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.fill_(0.01)
    return chunk, settings


def launch_ranks(num_ranks: int, dtype: str) -> list[Measured]:
    """Runs `measure` on real ranks of this machine; one result a rank."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, "--nproc-per-node", str(num_ranks), __file__]
        command += ["--dtype", dtype, "--worker", folder]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}")
        found = [json.loads(file.read_text()) for file in sorted(Path(folder).iterdir())]
    return [Measured(**values) for values in found]


def table(results: dict[int, list[Measured]]) -> str:
    """Markdown; of the ranks of a run the one with most optimizer state."""
    lines = [
        "| DP | parameters | weights | gradients | optimizer state a rank | x DP / that of DP 1 |",
        "|---|---|---|---|---|---|",
    ]
    alone = max(m.optimizer_bytes for m in results[min(results)]) * min(results)
    for dp, ranks in results.items():
        most = max(ranks, key=lambda m: m.optimizer_bytes)
        lines.append(
            f"| {dp} | {most.parameters:,} | {most.params_bytes:,} B | {most.grads_bytes:,} B "
            f"| {most.optimizer_bytes:,} B | {most.optimizer_bytes * dp / alone:.4f} |"
        )
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="of the weights")
    parser.add_argument("--dp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    arguments = parse(argv)
    if arguments.worker:
        found = dataclasses.asdict(measure(arguments.dtype))
        (arguments.worker / f"{found['rank']:03d}.json").write_text(json.dumps(found))
        return
    results = {dp: launch_ranks(dp, arguments.dtype) for dp in arguments.dp}
    print(f"{arguments.dtype} weights\n")
    print(table(results))
    if arguments.json:
        rows = {dp: [dataclasses.asdict(m) for m in ranks] for dp, ranks in results.items()}
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
