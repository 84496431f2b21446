"""Writes trained adapters as a folder of the PEFT library, to put on the model they started from.

PEFT has an adapter for each Hugging Face projection. Queries, keys and values share one A here, as
do gate and up, so that A is written under each of their names, and B is cut by rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.config.lora import LoraSection
from megappo.errors import ModelError
from megappo.models.hf_export import find_owners, gather_full, split_full
from megappo.models.name_map import tensor_map
from megappo.models.spec import ModelSpec
from megappo.models.weights import named_adapters

_WEIGHTS, _SETTINGS = "adapter_model.safetensors", "adapter_config.json"


def save_peft(
    chunks: Sequence[torch.nn.Module],
    spec: ModelSpec,
    settings: LoraSection,
    out: str | Path,
    *,
    base: str,
) -> None:
    """Writes `adapter_model.safetensors` and `adapter_config.json`; global rank 0 writes.

    Collective over all ranks.

    Args:
        chunks: this rank's chunks, with adapters.
        spec: the architecture.
        settings: of the adapters.
        out: folder to make, or to write anew.
        base: the folder that the model came from, noted as `base_model_name_or_path`.
    """
    from safetensors.torch import save_file

    tensors = {name: tensor.cpu() for name, tensor in export_peft(chunks, spec)}
    problems = [""]
    if dist.get_rank() == 0:
        try:
            folder = Path(out)
            folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
            described = _described(settings, tensors, base)
            (folder / _SETTINGS).write_text(json.dumps(described, indent=2) + "\n")
        except OSError as error:
            problems = [str(error)]
    dist.broadcast_object_list(problems, src=0)
    if problems[0]:
        raise ModelError(f"the adapters cannot be written to {out}: {problems[0]}")


def export_peft(chunks: Sequence[torch.nn.Module], spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of PEFT's file, complete, on every rank. Collective over TP and PP.

    Yields:
        Name and tensor: `...lora_A.weight` [r, in] and `...lora_B.weight` [out, r].
    """
    mine = named_adapters(chunks, spec)
    halves = {"a": {n: m.a.detach() for n, m in mine.items()}}
    halves["b"] = {n: m.b.detach() for n, m in mine.items()}
    owners = {half: find_owners(held, spread=False) for half, held in halves.items()}
    table = tensor_map(spec, "lm")
    for name in (name for name in table if name in owners["a"]):
        entry = table[name]
        by_outputs = entry.tp_dim == 0
        of_a = replace(entry, kind="plain", tp_dim=None if by_outputs else 1)
        of_b = replace(entry, tp_dim=0 if by_outputs else None)
        a = gather_full(halves["a"].get(name), owners["a"][name], of_a)
        b = gather_full(halves["b"].get(name), owners["b"][name], of_b)
        for (hf_name, _), rows in zip(entry.parts, split_full(b, entry, spec), strict=True):
            key = f"base_model.model.{hf_name.removesuffix('.weight')}"
            yield f"{key}.lora_A.weight", a.clone()
            yield f"{key}.lora_B.weight", rows.clone()


def _described(settings: LoraSection, tensors: Iterable[str], base: str) -> dict[str, Any]:
    """PEFT's settings of these adapters."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
