"""Runs models over one long and one short packed sequence; writes logits at a few positions.

Also what a bfloat16 model of each folder has of routers' biases, and names in its checkpoints.
"""

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

from megappo.models import build, hf_export, moe, packing, weights
from megappo.models.spec import load_spec


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    ps.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    folders = sorted(arguments.models.iterdir())
    torch.save(
        {folder.name: logits(folder) | in_bfloat16(folder) for folder in folders}, arguments.out
    )
    dist.destroy_process_group()


@torch.no_grad()
def logits(folder: Path) -> dict[str, torch.Tensor]:
    """[positions, V] of the long sequence, which stands second in its packed row."""
    spec, config, chunk = load(folder, torch.float32)
    short, long = far_sequences()
    packed = packing.pack([short, long])
    output = chunk(
        packed.tokens,
        packed.position_ids,
        None,
        packed_seq_params=packing.packed_seq_params(packed),
        padding_mask=moe.router_segments(packed.segments, config, True),
    )
    rows = [len(short) + position for position in FAR_POSITIONS]
    return {"logits": output[0, rows, : spec.vocab_size]}


def in_bfloat16(folder: Path) -> dict[str, object]:
    """Biases as they are exported, and the keys under which norms are saved."""
    spec, _, chunk = load(folder, torch.bfloat16)
    exported = hf_export.export_hf([chunk], spec, dtype=torch.bfloat16)
    group = ps.get_data_parallel_group(with_context_parallel=True)
    saved = chunk.sharded_state_dict(metadata={"dp_cp_group": group})
    keys = {tensor.key for name, tensor in saved.items() if "norm" in name}
    return {
        "biases": {n: t.clone() for n, t in exported if n.endswith("e_score_correction_bias")},
        "norm_keys": {key.removeprefix("decoder.layers.") for key in keys},
    }


def load(folder: Path, dtype: torch.dtype):
    spec = load_spec(folder)
    config = build.transformer_config(spec, tp=1, pp=1, dtype=dtype)
    chunk = build.build_chunk(spec, config, head="lm", pre_process=True, post_process=True)
    weights.load_hf_weights([chunk], folder, spec)
    return spec, config, chunk


if __name__ == "__main__":
    main()
