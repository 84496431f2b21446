"""Under which names a parameter may stand in a Megatron checkpoint.

The canonical names are those of `models.name_map`. On disk the same parameter has, by the version
and the settings of what wrote it:

    layers      one tensor for all, first dim the layer, or one each (`decoder.layers.3.`)
    experts     one tensor for all, first dim the expert (after the layer), or one each
    gate and up one tensor, gate rows first, or two (`weight_w`, `weight_v`)
    norms       the name of Transformer Engine's fused layer, or that of the local one; those within
                latent attention too

and in a rank's own state dict (`legacy_source`, FSDP) the experts are numbered within a module list
or in the parameter's name. `find` takes whichever there is.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass

from megappo.errors import CheckpointError
from megappo.models.name_map import LATENT_NORMS

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")
_NORM_SPELLINGS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    *((fused, local) for local, fused in LATENT_NORMS.items()),
)


@dataclass(frozen=True)
class Piece:
    """A part of a parameter: a whole tensor, or an entry of its first dims."""

    key: str
    index: tuple[int, ...] = ()
    """Layer and expert where these are the tensor's first dims."""


Pieces = tuple[Piece, ...]
"""Joined over rows."""


def find(name: str, keys: Container[str], *, joined_from_two: bool) -> Pieces | None:
    """Where a parameter stands, None if it is not there.

    Args:
        name: Canonical.
        keys: Of the tensors that the checkpoint has.
        joined_from_two: The rows are those of a gate above those of an up projection.

    Raises:
        CheckpointError: it is there twice.
    """
    found = [
        pieces
        for pieces in candidates(name, joined_from_two=joined_from_two)
        if all(piece.key in keys for piece in pieces)
    ]
    if len(found) > 1:
        raise CheckpointError(
            f"the checkpoint has {name} twice: as {' and '.join(p[0].key for p in found)}; one of "
            "them must go"
        )
    return found[0] if found else None


def has_layer_number(key: str) -> bool:
    """Whether a name on disk is of one layer, not of all."""
    return re.match(r"decoder\.layers\.\d", key) is not None


def candidates(name: str, *, joined_from_two: bool) -> Iterator[Pieces]:
    """Every place where a parameter may stand."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        yield (Piece(name),)
        return
    number, rest = int(layer[1]), layer[2]
    for spelling, expert in _spellings(rest):
        for prefix, index in (
            ("decoder.layers.", (number, *expert)),
            (f"decoder.layers.{number}.", expert),
        ):
            key = prefix + spelling
            yield (Piece(key, index),)
            if joined_from_two:
                yield (Piece(key + "_w", index), Piece(key + "_v", index))


def _spellings(rest: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names within the layer, and the expert where it is an index."""
    if expert := _EXPERT.fullmatch(rest):
        matrix, kind, number = expert[1], expert[2], int(expert[3])
        yield f"mlp.experts.experts.{matrix}.{kind}", (number,)
        yield f"mlp.experts.experts.{number}.{matrix}.{kind}", ()
        yield f"mlp.experts.local_experts.{number}.{matrix}.{kind}", ()
    yield rest, ()
    for fused, local in _NORM_SPELLINGS:
        if rest.startswith(fused):
            yield local + rest.removeprefix(fused), ()
        elif rest.startswith(local):
            yield fused + rest.removeprefix(local), ()
