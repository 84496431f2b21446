"""Says what lies at a path: format, layout, step, tensors and sizes, from headers alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from megappo.checkpoint import layout
from megappo.checkpoint.convert.checkpoint import is_weight
from megappo.checkpoint.convert.hf_source import HFTensors
from megappo.checkpoint.convert.legacy_source import LegacyTensors
from megappo.checkpoint.convert.output import size_text
from megappo.checkpoint.convert.place import Place
from megappo.checkpoint.convert.raw import num_bytes
from megappo.checkpoint.convert.safe_load import safe_load
from megappo.checkpoint.convert.torch_dist_source import COMMON_FILE, TorchDistTensors
from megappo.errors import CheckpointError, ModelError

Row = tuple[str, tuple[int, ...], torch.dtype]

_ARGUMENTS = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vp",
    "expert_model_parallel_size": "ep",
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "padded_vocab_size": "padded vocabulary",
}


def inspect(place: Place) -> list[str]:
    """Lines for a person.

    Raises:
        UserError: what is there is damaged.
    """
    if place.format == "huggingface":
        return _of_hf(place)
    step = "" if place.iteration is None else f", iteration {place.iteration}"
    role = f", {place.role} of a run" if place.role else ""
    lines = [f"format     {place.format}{step}{role}", f"folder     {place.folder}"]
    return [*lines, *(_of_ranks(place) if place.format == "legacy" else _of_chunks(place))]


def _of_hf(place: Place) -> list[str]:
    with HFTensors(place.folder) as tensors:
        rows = [(n, tensors.shape(n), tensors.dtype(n)) for n in sorted(tensors.names())]
    files = len(list(place.folder.glob("*.safetensors")))
    try:
        config = json.loads((place.folder / "config.json").read_text(encoding="utf-8"))
        kind, layers = config.get("model_type"), config.get("num_hidden_layers")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{place.folder / 'config.json'} cannot be read: {error}") from error
    head = [
        f"format     Hugging Face, {kind}, {layers} layers",
        f"folder     {place.folder}",
        f"files      {files}",
    ]
    return [*head, *_summary(rows)]


def _of_chunks(place: Place) -> list[str]:
    with TorchDistTensors(place.folder) as tensors:
        rows = [(name, t.shape, t.dtype) for name, t in sorted(tensors.tensors.items())]
        files = {chunk.file for t in tensors.tensors.values() for chunk in t.chunks}
    lines = [f"files      {len(files)}", *_run_layout(place)]
    common = place.folder / COMMON_FILE
    if common.is_file():
        lines += _common(safe_load(common))
    return [*lines, *_summary(rows)]


def _of_ranks(place: Place) -> list[str]:
    with LegacyTensors(place.folder) as tensors:
        size, first = tensors.size, next(iter(tensors.states.values()))
        rows = [
            (name, tensors.shape(piece), tensors.dtype(piece))
            for name, piece in sorted(tensors.pieces().items())
        ]
        lines = [f"layout     tp {size.tp}, pp {size.pp}, ep {size.ep}", *_common(first)]
    return [*lines, *_summary(rows)]


def _run_layout(place: Place) -> Iterator[str]:
    step = place.folder.parent
    if (step / layout.STATE_FILE).is_file():
        saved = layout.read_state(step).get("layout", {})
        yield "layout     " + ", ".join(f"{name} {value}" for name, value in saved.items())


def _common(common: Any) -> Iterator[str]:
    """What Megatron notes beside the tensors."""
    if not isinstance(common, dict):
        raise CheckpointError(f"{COMMON_FILE} holds a {type(common).__name__}, not a dict")
    if "iteration" in common:
        yield f"iteration  {common['iteration']}"
    arguments = vars(common["args"]) if common.get("args") is not None else {}
    known = [f"{name} {arguments[key]}" for key, name in _ARGUMENTS.items() if arguments.get(key)]
    if known:
        yield "arguments  " + ", ".join(known)


def _summary(rows: list[Row]) -> Iterator[str]:
    """Counts and sizes, weights first, then a line a tensor."""
    weights = [row for row in rows if is_weight(row[0])]
    others = [row for row in rows if not is_weight(row[0])]
    for what, chosen in (("weights", weights), ("other", others)):
        if chosen:
            kinds = Counter(str(dtype).removeprefix("torch.") for _, _, dtype in chosen)
            counted = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            size = sum(num_bytes(shape, dtype) for _, shape, dtype in chosen)
            yield f"{what:<10} {len(chosen)} tensors ({counted}), {size_text(size)}"
    for name, shape, dtype in weights:
        yield f"  {name} {list(shape)} {str(dtype).removeprefix('torch.')}"
