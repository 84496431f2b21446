"""Writes safetensors of a chosen size, a tensor after the other, and their index.

What goes into which file is decided from names, shapes and dtypes alone, so that files can be
written by several processes. The safetensors library writes a file only from memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megappo.checkpoint.convert.hf_source import DTYPES
from megappo.checkpoint.convert.raw import byte_view, num_bytes
from megappo.models.spec import INDEX_FILE, WEIGHTS_FILE

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return num_bytes(self.shape, self.dtype)


@dataclass(frozen=True, kw_only=True)
class File:
    """A safetensors file to write."""

    name: str
    tensors: tuple[Planned, ...]

    def header(self) -> bytes:
        """Length and JSON of the format, padded to a multiple of 8 bytes."""
        content: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for tensor in self.tensors:
            end = at + tensor.num_bytes
            content[tensor.name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [at, end],
            }
            at = end
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def plan_files(tensors: Sequence[Planned], max_file_bytes: int) -> list[File]:
    """Deals tensors to files, none larger than `max_file_bytes` unless a single tensor is."""
    groups: list[list[Planned]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.num_bytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.num_bytes
    count = len(groups)
    names = [WEIGHTS_FILE]
    if count > 1:
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    return [File(name=n, tensors=tuple(g)) for n, g in zip(names, groups, strict=True)]


def write_file(
    folder: Path, file: File, blocks: Iterable[tuple[str, Iterable[Tensor]]]
) -> Iterator[int]:
    """Writes one file, and yields the bytes of each block as it is written.

    Args:
        folder: Where to.
        file: What is in it.
        blocks: Name of each tensor of `file`, in its order, and its rows.
    """
    with (folder / file.name).open("wb") as stream:
        stream.write(file.header())
        for planned, (name, parts) in zip(file.tensors, blocks, strict=True):
            assert planned.name == name, (planned.name, name)
            written = 0
            for part in parts:
                view = byte_view(part.to(planned.dtype).contiguous())
                stream.write(view)
                written += len(view)
                yield len(view)
            assert written == planned.num_bytes, (name, written, planned.num_bytes)


def write_index(folder: Path, files: Sequence[File]) -> None:
    """Says where each tensor is, if there are several files."""
    if len(files) == 1:
        return
    tensors = [(tensor, file.name) for file in files for tensor in file.tensors]
    index = {
        "metadata": {"total_size": sum(tensor.num_bytes for tensor, _ in tensors)},
        "weight_map": {
            tensor.name: file for tensor, file in sorted(tensors, key=lambda x: x[0].name)
        },
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
