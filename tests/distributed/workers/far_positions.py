"""Runs models over one long and one short packed sequence; writes logits at a few positions."""

# ruff: noqa: E402 - Megatron may be imported only after cpu_backend.install.
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megappo.distributed.cpu_backend import install

install("cpu")

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core import tensor_parallel

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_models import FAR_POSITIONS, far_sequences

from megappo.models import build, moe, packing, weights
from megappo.models.spec import load_spec


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    ps.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    found = {folder.name: logits(folder) for folder in sorted(arguments.models.iterdir())}
    torch.save(found, arguments.out)
    dist.destroy_process_group()


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    """[positions, V] of the long sequence, which stands second in its packed row."""
    spec = load_spec(folder)
    config = build.transformer_config(spec, tp=1, pp=1)
    chunk = build.build_chunk(spec, config, head="lm", pre_process=True, post_process=True)
    weights.load_hf_weights([chunk], folder, spec)
    short, long = far_sequences()
    packed = packing.pack([short, long])
    output = chunk(
        packed.tokens,
        packed.position_ids,
        None,
        packed_seq_params=packing.packed_seq_params(packed),
        padding_mask=moe.router_segments(packed.segments, config, True),
    )
    return output[0, [len(short) + position for position in FAR_POSITIONS], : spec.vocab_size]


if __name__ == "__main__":
    main()
