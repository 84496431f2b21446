"""A Megatron checkpoint of any format by canonical names, and as the Hugging Face tensors it makes.

Whatever the checkpoint has is used, known to be no weight, or an error: a model is never exported
without a layer that nobody asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from megappo.checkpoint.convert.disk_names import Piece, Pieces, find, has_layer_number
from megappo.checkpoint.convert.place import Place
from megappo.checkpoint.convert.raw import BLOCK_BYTES, num_bytes
from megappo.errors import CheckpointError
from megappo.models.hf_export import split_full
from megappo.models.name_map import (
    OUTPUT_LAYER,
    Entry,
    Head,
    tensor_map,
)
from megappo.models.spec import ModelSpec
from megappo.models.weights import listed

_NOT_WEIGHTS = (
    "optimizer.",
    "chained_",
    "opt_param_scheduler",
    "scheduler",
    "rng_state",
    "rerun_state_machine",
    "rotary_pos_emb.",
)


class DiskTensors(Protocol):
    """What each format gives: its tensors by the names that they have there."""

    folder: Path

    @property
    def keys(self) -> set[str]:
        """Names of the tensors."""
        ...

    def shape(self, piece: Piece) -> tuple[int, ...]:
        """Of what a piece names."""
        ...

    def leading_shape(self, piece: Piece) -> tuple[int, ...]:
        """Sizes of the dims that a piece's index takes away."""
        ...

    def dtype(self, piece: Piece) -> torch.dtype:
        """Of a piece."""
        ...

    def read(self, piece: Piece, start: int, stop: int) -> Tensor:
        """Rows of a piece."""
        ...

    def __enter__(self) -> DiskTensors: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def is_weight(key: str) -> bool:
    """Whether a tensor on disk belongs to the model, not to its optimizer or a random stream."""
    return not key.startswith(_NOT_WEIGHTS) and "_extra_state" not in key


def _is_mtp(key: str, spec: ModelSpec) -> bool:
    """Whether a tensor is of an MTP layer; it is unknown where config.json counts no such layer."""
    return spec.dropped_layers > 0 and key.startswith("mtp.")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a Hugging Face tensor comes from."""

    name: str
    """Canonical, of the parameter that it is a part of."""
    part: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class CheckpointTensors:
    """The Hugging Face tensors of a Megatron checkpoint.

    Args:
        place: The checkpoint.
        spec: Architecture that it must have.

    Raises:
        CheckpointError: it is of another architecture, is damaged, or is of an unknown format.
    """

    def __init__(self, place: Place, spec: ModelSpec) -> None:
        self.place, self.spec, self.folder = place, spec, place.folder
        self._stack = ExitStack()
        self._disk = self._stack.enter_context(place.open())
        self.mtp = sorted(key for key in self._disk.keys if _is_mtp(key, spec))
        """Tensors on disk of layers that are declared dropped, and left out."""
        self._last: tuple[str, list[Tensor]] = ("", [])
        try:
            self.head = _head(self._disk)
            self._table = parameters(spec, self.head)
            self._pieces = _match(self._disk, self._table, spec, self.head)
        except BaseException:
            self._stack.close()
            raise
        self._sources = self._make_sources()

    def __enter__(self) -> CheckpointTensors:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def unused(self) -> list[str]:
        """Tensors on disk that are no weights and are left out."""
        return sorted(
            key for key in set(self._disk.keys).difference(self.mtp) if not is_weight(key)
        )

    def names(self) -> list[str]:
        """Of the Hugging Face tensors, in the order of the layers."""
        return list(self._sources)

    def entry(self, name: str) -> Entry:
        """The parameter that a Hugging Face tensor is a part of."""
        return self._table[self._sources[name].name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a Hugging Face tensor."""
        return self._sources[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Of a Hugging Face tensor."""
        return self._sources[name].dtype

    def blocks(self, name: str) -> Iterator[Tensor]:
        """A Hugging Face tensor by rows, in order; its parts together are the whole."""
        source = self._sources[name]
        entry = self._table[source.name]
        if entry.kind == "vocab":
            rows = source.shape[0]
            step = max(1, BLOCK_BYTES // num_bytes(source.shape[1:], source.dtype))
            for start in range(0, rows, step):
                yield self._read(source.name, start, min(start + step, rows))
            return
        # The parts of a parameter are asked for one after the other, and read once.
        if self._last[0] != source.name:
            self._last = ("", [])
            full = self.parameter(source.name)
            self._last = (source.name, split_full(full, entry, self.spec))
        yield self._last[1][source.part].contiguous()

    def parameter_names(self) -> list[str]:
        """Canonical names, in the order of the layers."""
        return list(self._table)

    def parameter(self, name: str) -> Tensor:
        """A Megatron parameter by its canonical name, whole and with the vocabulary's padding."""
        return self._read(name, 0, self._num_rows(name))

    def _num_rows(self, name: str) -> int:
        return sum((self._disk.shape(p) or (1,))[0] for p in self._pieces[name])

    def _read(self, name: str, start: int, stop: int) -> Tensor:
        found = []
        for piece in self._pieces[name]:
            rows = (self._disk.shape(piece) or (1,))[0]
            first, last = max(start, 0), min(stop, rows)
            if first < last:
                found.append(self._disk.read(piece, first, last))
            start, stop = start - rows, stop - rows
        return found[0] if len(found) == 1 else torch.cat(found)

    def _make_sources(self) -> dict[str, Source]:
        return {
            hf_name: Source(
                name=name, part=part, shape=shape, dtype=self._disk.dtype(self._pieces[name][0])
            )
            for name, entry in self._table.items()
            for part, (hf_name, shape) in enumerate(entry.parts)
        }


def parameters(spec: ModelSpec, head: Head) -> dict[str, Entry]:
    """Every parameter that a checkpoint of the model has; a tied head is the embedding."""
    table = tensor_map(spec, head)
    if head == "lm" and spec.tied:
        del table[OUTPUT_LAYER]
    return table


def full_shape(entry: Entry) -> tuple[int, ...]:
    """Of the Megatron parameter, without padding: its parts' rows together."""
    shapes = [shape for _, shape in entry.parts]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _head(disk: DiskTensors) -> Head:
    """A value head is an output layer of one row."""
    piece = Piece(OUTPUT_LAYER)
    is_value = OUTPUT_LAYER in disk.keys and disk.shape(piece)[0] == 1
    return "value" if is_value else "lm"


def _match(
    disk: DiskTensors, table: Mapping[str, Entry], spec: ModelSpec, head: Head
) -> dict[str, Pieces]:
    """Places of all parameters.

    Raises:
        CheckpointError: what is missing, left over, or of another shape or layer count.
    """
    keys = {key for key in disk.keys if is_weight(key) and not _is_mtp(key, spec)}
    found: dict[str, Pieces] = {}
    missing: set[str] = set()
    for name, entry in table.items():
        pieces = find(name, keys, joined_from_two=entry.kind == "gate_up")
        if pieces is None:
            missing.add(name)
        else:
            found[name] = pieces
    left = keys - {piece.key for pieces in found.values() for piece in pieces}
    if missing or left:
        raise CheckpointError(
            f"{disk.folder} does not hold the {spec.model_type} model with "
            f"{'a value head' if head == 'value' else 'a language-model head'} and "
            f"{spec.num_layers} layers that config.json describes: missing {listed(missing)}; "
            f"left over {listed(left)}; give the folder of the model it was trained from"
        )
    wrong = [
        line for name, pieces in found.items() for line in _misfits(disk, name, pieces, table, spec)
    ]
    if wrong:
        raise CheckpointError(
            f"{disk.folder} is of another {spec.model_type} model (checkpoint -> config.json): "
            f"{listed(set(wrong))}; give the folder of the model it was trained from"
        )
    return found


def _misfits(
    disk: DiskTensors, name: str, pieces: Pieces, table: Mapping[str, Entry], spec: ModelSpec
) -> Iterator[str]:
    entry = table[name]
    shapes = [disk.shape(piece) for piece in pieces]
    rows = (sum(s[0] for s in shapes), *shapes[0][1:]) if shapes[0] else ()
    needed = full_shape(entry)
    # Padding adds rows to the vocabulary; how many is for the writer to choose.
    fits = rows[1:] == needed[1:] and len(rows) == len(needed)
    fits = fits and (rows[0] >= needed[0] if entry.kind == "vocab" else rows == needed)
    if not fits:
        yield f"{name} {list(rows)} -> {list(needed)}"
    for piece in pieces:
        both = (spec.num_layers, spec.num_experts)
        counts = both[1:] if has_layer_number(piece.key) else both[: len(piece.index)]
        leading = disk.leading_shape(piece)
        if piece.index and leading != counts:
            yield f"{piece.key} for {list(leading)} layers or experts -> {list(counts)}"
