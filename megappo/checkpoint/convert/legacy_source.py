"""Tensors of Megatron's legacy format: a `torch.save` file a rank, which is mapped and not loaded.

Folders are called `mp_rank_TT`, then `_PPP` with pipeline stages and `_EEE` with expert ranks, so
with three digits alone only the arguments in the file tell which of the two they are. Layers count
from a chunk's first one, chunks of a stage are `model0`, `model1` and so on (chunk v of stage p is
number v x PP + p), and experts count from a rank's first one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megappo.checkpoint.convert.disk_names import Piece
from megappo.checkpoint.convert.safe_load import safe_load
from megappo.errors import CheckpointError

_RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
RANK_FILE = "model_optim_rng.pt"
_CHUNK = re.compile(r"model(\d*)")
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..+)")
_EXPERT = re.compile(
    r"(.+\.mlp\.experts\.)local_experts\.(\d+)\.(.+)|(.+\.mlp\.experts\..+\.(?:weight|bias))(\d+)"
)
_ROWS = (
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_q_proj.weight",
    "linear_q_up_proj.weight",
    "linear_kv_up_proj.weight",
    "word_embeddings.weight",
    "output_layer.weight",
)
"""What TP splits by rows; `_HALVES` within the gate and within the up projection."""
_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
_HALVES = ("linear_fc1.weight", "linear_fc1.bias")


@dataclass(frozen=True, order=True)
class Rank:
    """Whose file it is."""

    tp: int
    pp: int
    ep: int


class LegacyTensors:
    """The tensors of all ranks, joined, with layers and experts numbered over the whole model.

    Args:
        folder: That has the folders of the ranks.

    Raises:
        CheckpointError: a rank's file is missing or cannot be read, or ranks do not fit together.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.states = {rank: safe_load(path, memory_mapped=True) for rank, path in _files(folder)}
        self.size = _check_grid(folder, self.states)
        self._shards: dict[str, dict[int, Tensor]] = defaultdict(dict)
        self._place_all()
        for name, shards in self._shards.items():
            if sorted(shards) != list(range(len(shards))) or len(shards) not in (1, self.size.tp):
                raise CheckpointError(f"{folder}: only TP ranks {sorted(shards)} have {name}")

    def __enter__(self) -> LegacyTensors:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._shards.clear()
        self.states.clear()

    @property
    def keys(self) -> set[str]:
        """Names of the joined tensors."""
        return set(self._shards)

    def pieces(self) -> dict[str, Piece]:
        """Every joined tensor by its name."""
        return {name: Piece(name) for name in self._shards}

    def shape(self, piece: Piece) -> tuple[int, ...]:
        """Of a joined tensor."""
        shards = self._shards[piece.key]
        shape = list(shards[0].shape)
        if (dim := split_dim(piece.key)) is not None:
            shape[dim] = sum(shard.shape[dim] for shard in shards.values())
        return tuple(shape)

    def leading_shape(self, piece: Piece) -> tuple[int, ...]:
        """Layers and experts are never dims in this format."""
        return ()

    def dtype(self, piece: Piece) -> torch.dtype:
        """Of a joined tensor."""
        dtype: torch.dtype = self._shards[piece.key][0].dtype
        return dtype

    def read(self, piece: Piece, start: int, stop: int) -> Tensor:
        """Rows of a joined tensor, copied out of the files."""
        found = self._shards[piece.key]
        shards = [found[rank] for rank in range(len(found))]
        dim = split_dim(piece.key)
        if dim is None or len(shards) == 1:
            return shards[0][start:stop].clone()
        if dim == 1:
            return torch.cat([shard[start:stop] for shard in shards], dim=1)
        if piece.key.rstrip("0123456789").endswith(_HALVES):
            halves = [half for shard in shards for half in shard.chunk(2)]
            shards = halves[::2] + halves[1::2]
        pieces = []
        for shard in shards:
            first, last = max(start, 0), min(stop, len(shard))
            if first < last:
                pieces.append(shard[first:last])
            start, stop = start - len(shard), stop - len(shard)
        return torch.cat(pieces)

    def _place_all(self) -> None:
        offsets = _layer_offsets(self.states, self.size)
        for rank, state in sorted(self.states.items()):
            for chunk, content in _chunks(state):
                offset = offsets[rank.pp, chunk]
                experts = _num_experts(content)
                for local, value in content.items():
                    if not isinstance(value, Tensor) or "_extra_state" in local:
                        continue
                    if local == "output_layer.weight" and _is_copy(self.states, rank):
                        continue
                    name = _whole_name(local, offset, rank.ep * experts)
                    self._shards[name].setdefault(rank.tp, value)


def split_dim(key: str) -> int | None:
    """Dim that is split over TP, None for a tensor that all TP ranks hold."""
    key = key.rstrip("0123456789")
    if key.endswith(_COLUMNS):
        return 1
    return 0 if key.endswith((*_ROWS, *_HALVES)) else None


def _files(folder: Path) -> list[tuple[Rank, Path]]:
    """Every rank's file.

    Raises:
        CheckpointError: a folder without its file.
    """
    matches = {p: m for p in sorted(folder.iterdir()) if (m := _RANK_FOLDER.fullmatch(p.name))}
    missing = [p.name for p in matches if not (p / RANK_FILE).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {', '.join(missing)} have no {RANK_FILE}; copy them again"
        )
    lone = [p for p, m in matches.items() if m[2] and not m[3]]
    lone_is_expert = bool(lone) and _is_expert_only(lone[0] / RANK_FILE)
    found = []
    for path, match in matches.items():
        pp, ep = match[2] or "0", match[3] or "0"
        if match[2] and not match[3] and lone_is_expert:
            pp, ep = "0", match[2]
        found.append((Rank(int(match[1]), int(pp), int(ep)), path / RANK_FILE))
    return found


def _is_expert_only(path: Path) -> bool:
    """Whether the second number of a folder's name is the expert rank, by the arguments inside."""
    arguments = safe_load(path, memory_mapped=True).get("args")
    stages = getattr(arguments, "pipeline_model_parallel_size", None)
    experts = getattr(arguments, "expert_model_parallel_size", 1) or 1
    return stages == 1 and experts > 1


def _check_grid(folder: Path, states: dict[Rank, Any]) -> Rank:
    """Sizes of TP, PP and EP.

    Raises:
        CheckpointError: a rank is missing, or a file has no model.
    """
    size = Rank(
        1 + max(rank.tp for rank in states),
        1 + max(rank.pp for rank in states),
        1 + max(rank.ep for rank in states),
    )
    missing = size.tp * size.pp * size.ep - len(states)
    if missing:
        raise CheckpointError(
            f"{folder}: {missing} of {size.tp} x {size.pp} x {size.ep} (TP x PP x EP) ranks are "
            "missing; copy the checkpoint again"
        )
    for rank, state in states.items():
        if not isinstance(state, dict) or not list(_chunks(state)):
            raise CheckpointError(f"{folder}: the file of {rank} has no entry 'model'")
        _check_arguments(folder, state.get("args"), size)
    return size


def _check_arguments(folder: Path, arguments: Any, size: Rank) -> None:
    """Refuses what the files' names do not show and would be joined wrongly."""
    expert_tp = getattr(arguments, "expert_tensor_parallel_size", None)
    if getattr(arguments, "num_experts", None) and expert_tp not in (None, size.tp):
        raise CheckpointError(
            f"{folder}: experts are split over {expert_tp} tensor-parallel ranks, the rest over "
            f"{size.tp}, which is not read in this format; save it with --ckpt-format torch_dist"
        )
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        stated, found = getattr(arguments, name, None), size.tp if name[0] == "t" else size.pp
        if stated not in (None, found):
            raise CheckpointError(
                f"{folder} has the files of {found} ranks, but was saved with {name} {stated}; "
                "copy the checkpoint again"
            )


def _chunks(state: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Number and parameters of a rank's model chunks."""
    found = [(int(m[1] or 0), state[key]) for key in state if (m := _CHUNK.fullmatch(str(key)))]
    return sorted(((number, content) for number, content in found), key=lambda x: x[0])


def _layer_offsets(states: dict[Rank, Any], size: Rank) -> dict[tuple[int, int], int]:
    """Layers before each chunk, by stage and number of the chunk."""
    counts = {
        (rank.pp, number): 1 + max((_layer(name) for name in content), default=-1)
        for rank, state in states.items()
        for number, content in _chunks(state)
        if rank.tp == rank.ep == 0
    }
    offsets: dict[tuple[int, int], int] = {}
    total = 0
    for place in sorted(counts, key=lambda place: place[1] * size.pp + place[0]):
        offsets[place] = total
        total += counts[place]
    return offsets


def _layer(name: str) -> int:
    match = _LAYER.match(name)
    return int(match[2]) if match else -1


def _num_experts(content: dict[str, Any]) -> int:
    """Experts of a layer on this rank."""
    numbers = [int(m[2] or m[5]) for name in content if (m := _EXPERT.fullmatch(name))]
    return 1 + max(numbers, default=-1)


def _whole_name(local: str, layer_offset: int, expert_offset: int) -> str:
    """Name with layer and expert counted over the whole model."""
    if match := _LAYER.fullmatch(local):
        local = f"{match[1]}{int(match[2]) + layer_offset}{match[3]}"
    if match := _EXPERT.fullmatch(local):
        if match[2]:
            return f"{match[1]}local_experts.{int(match[2]) + expert_offset}.{match[3]}"
        return f"{match[4]}{int(match[5]) + expert_offset}"
    return local


def _is_copy(states: dict[Rank, Any], rank: Rank) -> bool:
    """Whether the last stage's output layer is the embedding, which the first stage has."""
    tied = getattr(states[rank].get("args"), "untie_embeddings_and_output_weights", True) is False
    return tied and rank.pp > 0
