"""Compares two models on disk, of any format: the bits of every tensor, and a hash of each.

Both sides are seen as Hugging Face tensors, so it does not matter how either is stored, padded or
cut. Equal means equal bits and equal dtypes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megappo.checkpoint.convert.checkpoint import CheckpointTensors
from megappo.checkpoint.convert.hf_source import HFTensors
from megappo.checkpoint.convert.output import Progress
from megappo.checkpoint.convert.place import Place
from megappo.checkpoint.convert.raw import byte_view
from megappo.checkpoint.convert.rules import MTP_RULE
from megappo.errors import CheckpointError
from megappo.models.name_map import VALUE_HEAD, Head
from megappo.models.spec import ModelSpec, load_spec
from megappo.models.weights import check_names, dropped_names, listed


class Side(Protocol):
    """One of the two models."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a Hugging Face tensor."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Of a Hugging Face tensor."""
        ...

    def blocks(self, name: str) -> Iterator[Tensor]:
        """A Hugging Face tensor by rows."""
        ...


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A tensor on both sides."""

    name: str
    first: str
    """Dtype, shape and SHA-256 on the first side."""
    second: str

    @property
    def is_equal(self) -> bool:
        """Same bits, shape and dtype."""
        return self.first == self.second


def verify(
    first: Place,
    second: Place,
    *,
    like: Path | None,
    trust_remote_code: bool,
    say: Callable[[str], None],
    progress: Callable[[int], Progress],
) -> list[Compared]:
    """Compares all tensors, and says each one's hash.

    Args:
        first: A model.
        second: Another.
        like: The model's Hugging Face folder, needed if neither side is one.
        trust_remote_code: As `load_spec` takes it.
        say: Takes a line a tensor.
        progress: Makes a progress line for a number of bytes.

    Raises:
        UserError: a side is damaged, or they are different models.
    """
    folder = spec_folder(first, second, like)
    spec = load_spec(folder, trust_remote_code=trust_remote_code)
    with ExitStack() as stack:
        one, two = (_open(place, spec, stack) for place in (first, second))
        for side in (one, two):
            if left_out := _num_mtp(side, spec):
                say(f"left out   {left_out} tensors in {side.folder} of {MTP_RULE}")
        names, others = (_names(side, spec) for side in (one, two))
        if set(names) != set(others):
            raise CheckpointError(
                f"{first.folder} and {second.folder} have different tensors: only in the first "
                f"{listed(set(names) - set(others))}; only in the second "
                f"{listed(set(others) - set(names))}"
            )
        total = sum(torch.Size(one.shape(n)).numel() * one.dtype(n).itemsize for n in names)
        line = progress(2 * total)
        found = []
        for name in names:
            result = Compared(
                name=name, first=_hash(one, name, line), second=_hash(two, name, line)
            )
            found.append(result)
            shown = "equal     " if result.is_equal else "DIFFERENT "
            more = "" if result.is_equal else f"\n           but {result.second}"
            say(f"{shown} {name} {result.first}{more}")
        line.close()
    return found


def spec_folder(first: Place, second: Place, like: Path | None) -> Path:
    """The Hugging Face folder that says what model it is.

    Raises:
        CheckpointError: there is none.
    """
    for place in (first, second):
        if place.format == "huggingface":
            return place.folder
    if like is None:
        raise CheckpointError(
            "neither is a Hugging Face folder: give the model's with --like, for its config.json"
        )
    return like


def _open(place: Place, spec: ModelSpec, stack: ExitStack) -> HFTensors | CheckpointTensors:
    if place.format == "huggingface":
        return stack.enter_context(HFTensors(place.folder))
    return stack.enter_context(CheckpointTensors(place, spec))


def _names(side: HFTensors | CheckpointTensors, spec: ModelSpec) -> list[str]:
    """Tensors to compare; a tied head that is stored again is the embedding and left out."""
    if isinstance(side, CheckpointTensors):
        return side.names()
    head: Head = "value" if VALUE_HEAD in side.names() else "lm"
    return list(check_names(side, spec, head))


def _num_mtp(side: HFTensors | CheckpointTensors, spec: ModelSpec) -> int:
    return len(side.mtp if isinstance(side, CheckpointTensors) else dropped_names(side, spec))


def _hash(side: Side, name: str, progress: Progress) -> str:
    digest = hashlib.sha256()
    for block in side.blocks(name):
        view = byte_view(block.contiguous())
        digest.update(view)
        progress.add(len(view))
    dtype = str(side.dtype(name)).removeprefix("torch.")
    return f"{dtype} {list(side.shape(name))} sha256:{digest.hexdigest()}"
