"""Fills Megatron models from a torch_dist checkpoint, by Megatron's own loader in any layout.

The way from a checkpoint to a model that does not go through Hugging Face tensors: `verify`
compares its logits, and the tests load with it what `to_megatron` wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch


def load_model(chunks: Sequence[torch.nn.Module], folder: Path) -> None:
    """Fills every parameter of this rank's chunks. Collective over the world.

    How layers and experts are stored is taken from the checkpoint, as Megatron-LM does.

    Args:
        chunks: From `build_chunk`, bare.
        folder: With `.metadata` and the `.distcp` files.
    """
    from megatron.core import dist_checkpointing, parallel_state

    content = dist_checkpointing.load_content_metadata(str(folder)) or {}
    content["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    keys = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    wanted = {
        key: chunk.sharded_state_dict(metadata=content)
        for key, chunk in zip(keys, chunks, strict=True)
    }
    found = dist_checkpointing.load(wanted, str(folder))
    for key, chunk in zip(keys, chunks, strict=True):
        chunk.load_state_dict(found[key], strict=True)
