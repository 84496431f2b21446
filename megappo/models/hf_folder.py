"""Reads slices of a folder's safetensors, and writes a folder that transformers and SGLang load.

A written folder appears under its name only when it is complete: files are written and flushed
under a temporary name beside it, which is then renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megappo.errors import ModelError
from megappo.models.name_map import Head
from megappo.models.spec import INDEX_FILE, WEIGHTS_FILE

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
EXTRA_TEMPLATES = "additional_chat_templates"


class TensorReader(Protocol):
    """Full tensors of a model folder by their Hugging Face names, read in slices."""

    folder: Path

    def names(self) -> set[str]:
        """Every tensor that the folder has."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a tensor."""
        ...

    def read(self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows (`dim` 0) or columns (`dim` 1) from `start` to `stop`, by default all of them."""
        ...


class TensorFolder:
    """The tensors of a model folder by name; files are mapped when first read, not loaded."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index = self.folder / INDEX_FILE
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()
        if index.is_file():
            content = json.loads(index.read_text(encoding="utf-8"))
            self._file_of: dict[str, str] = content["weight_map"]
        else:
            self._file_of = dict.fromkeys(self._open(WEIGHTS_FILE).keys(), WEIGHTS_FILE)

    def __enter__(self) -> TensorFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        self._files.clear()

    def names(self) -> set[str]:
        """Every tensor that the folder has."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows (`dim` 0) or columns (`dim` 1) from `start` to `stop`, by default all of them."""
        rows = slice(start, stop)
        part: Tensor = self._slice(name)[rows if dim == 0 else (slice(None), rows)]
        return part

    def _slice(self, name: str) -> Any:
        return self._open(self._file_of[name]).get_slice(name)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = self._stack.enter_context(
                safe_open(self.folder / file, framework="pt")
            )
        return self._files[file]


def write_folder(
    tensors: Iterable[tuple[str, Tensor]],
    source: str | Path,
    out: str | Path,
    *,
    head: Head = "lm",
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes weights and every side file of the folder that the model came from.

    Args:
        tensors: Names and full tensors; consumed one at a time, at most one shard is held.
        source: Folder with config.json, tokenizer, chat template, generation config, licence.
        out: Folder to make; must not exist.
        head: `value` describes the folder as a sequence classifier with one label.
        max_shard_bytes: Largest size of a weights file, unless one tensor alone is larger.

    Raises:
        ModelError: `out` exists.
    """
    source, out = Path(source), Path(out)
    if out.exists():
        raise ModelError(f"{out} exists; choose a folder that does not, or move it away")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    dtype = _write_weights(tensors, partial, max_shard_bytes)
    copy_side_files(source, partial)
    write_config(source, partial, dtype, head)
    for path in partial.rglob("*"):
        if path.is_file():
            path.chmod(0o644)  # safetensors makes files that only their owner may read
        flush(path)
    flush(partial)
    partial.rename(out)
    flush(out.parent)


def _write_weights(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, max_shard_bytes: int
) -> torch.dtype:
    """Writes shards, names them by their final count, and returns the last tensor's dtype."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    pending_bytes = total_bytes = 0

    def flush_shard() -> None:
        save_file(pending, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    dtype = torch.float32
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if pending and pending_bytes + size > max_shard_bytes:
            flush_shard()
            pending_bytes = 0
        # A clone, because the exporter may yield a view of a live parameter.
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        pending_bytes += size
        total_bytes += size
        dtype = tensor.dtype
    flush_shard()
    _name_shards(folder, shards, total_bytes)
    return dtype


def _name_shards(folder: Path, shards: list[list[str]], total_bytes: int) -> None:
    count = len(shards)
    if count == 1:
        (folder / "shard-0").rename(folder / WEIGHTS_FILE)
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        (folder / f"shard-{i}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def copy_side_files(source: Path, folder: Path) -> None:
    """Copies all but weights: config, tokenizer, chat templates, generation config, licence."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(path, folder / path.name)
    if (source / EXTRA_TEMPLATES).is_dir():
        shutil.copytree(source / EXTRA_TEMPLATES, folder / EXTRA_TEMPLATES)


def write_config(source: Path, folder: Path, dtype: torch.dtype, head: Head) -> None:
    """Writes the config.json of `source` with the dtype, and the head, of new weights."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if config.get("num_nextn_predict_layers"):
        config["num_nextn_predict_layers"] = 0  # these layers are dropped: `ModelSpec`
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).split(".")[-1]
    if head == "value":
        config["architectures"] = [
            name.replace("ForCausalLM", "ForSequenceClassification")
            for name in config.get("architectures") or ()
        ]
        config["id2label"], config["label2id"] = {"0": "LABEL_0"}, {"LABEL_0": 0}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def flush(path: Path) -> None:
    """Waits until a file's or folder's content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
