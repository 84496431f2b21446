"""What lies at a path: which format, which model of which step, and how it is opened."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megappo.checkpoint import layout
from megappo.checkpoint.convert.legacy_source import LegacyTensors
from megappo.checkpoint.convert.torch_dist_source import (
    CONFIG_FILE,
    METADATA_FILE,
    TorchDistTensors,
)
from megappo.errors import CheckpointError

if TYPE_CHECKING:
    from megappo.checkpoint.convert.checkpoint import DiskTensors

TRACKER_FILE = "latest_checkpointed_iteration.txt"
RELEASE = "release"
Format = Literal["huggingface", "torch_dist", "fsdp_dtensor", "legacy"]
_RANK_FOLDER = "mp_rank_*"
_RANK_FILE = "model_optim_rng.pt"
_ITERATION = re.compile(r"iter_(\d+)")
_FORMATS = (
    "a Hugging Face folder (config.json and safetensors), Megatron's torch_dist (metadata.json and "
    ".distcp files), Megatron's ranks (mp_rank_*/model_optim_rng.pt), or a run's folder"
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A model on disk."""

    format: Format
    folder: Path
    """That has the files themselves."""
    iteration: int | None = None
    """Megatron's iteration or the run's step, None where it is not said."""
    role: str | None = None
    """`actor` or `critic` of a run."""

    def open(self) -> DiskTensors:
        """The tensors of a Megatron checkpoint.

        Raises:
            CheckpointError: damaged, or a Hugging Face folder.
        """
        if self.format == "huggingface":
            raise CheckpointError(f"{self.folder} is a Hugging Face folder, not a checkpoint")
        if self.format == "legacy":
            return LegacyTensors(self.folder)
        return TorchDistTensors(self.folder)


def find_place(path: str | Path, *, role: str = "actor") -> Place:
    """Follows a run's or Megatron's pointer to the newest checkpoint, and tells the format.

    Args:
        path: A model folder, a checkpoint, a folder of checkpoints or a run's folder.
        role: Which model of a run's checkpoint.

    Raises:
        CheckpointError: nothing there, or a format that is not read.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(
            f"{path} {'is a file' if path.exists() else 'does not exist'}; give {_FORMATS}"
        )
    if (path / TRACKER_FILE).is_file():
        return find_place(_tracked(path))
    if (path / layout.STATE_FILE).is_file():
        return _of_run(path, role)
    for folder in (path, layout.folder_of(path)):
        if layout.complete_steps(folder) and (newest := layout.latest(folder)):
            return _of_run(newest, role)
    return _by_files(path)


def _by_files(path: Path) -> Place:
    iteration = int(m[1]) if (m := _ITERATION.fullmatch(path.name)) else None
    if (path / METADATA_FILE).is_file():
        kind: Format = "torch_dist" if (path / CONFIG_FILE).is_file() else "fsdp_dtensor"
        role = path.name if (path.parent / layout.STATE_FILE).is_file() else None
        return Place(format=kind, folder=path, iteration=iteration, role=role)
    if any((p / _RANK_FILE).is_file() for p in path.glob(_RANK_FOLDER)):
        return Place(format="legacy", folder=path, iteration=iteration)
    if (path / "config.json").is_file():
        return Place(format="huggingface", folder=path)
    if (path / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{path} has {CONFIG_FILE} but no {METADATA_FILE}: it is incomplete, or of the old "
            "zarr format, which is not read; save it with --ckpt-format torch_dist"
        )
    raise CheckpointError(f"{path} is no format that is read; known are {_FORMATS}")


def _tracked(path: Path) -> Path:
    """The checkpoint that Megatron's tracker file names."""
    named = (path / TRACKER_FILE).read_text(encoding="utf-8").strip()
    if named != RELEASE and not named.isdigit():
        raise CheckpointError(f"{path / TRACKER_FILE} holds {named!r}, which is no iteration")
    folder = path / (RELEASE if named == RELEASE else f"iter_{int(named):07d}")
    if not folder.is_dir():
        raise CheckpointError(
            f"{path / TRACKER_FILE} names {folder.name}, which is not there; write the name of one "
            "that is"
        )
    return folder


def _of_run(step: Path, role: str) -> Place:
    state = layout.read_state(step)
    folder = step / role
    if not folder.is_dir():
        have = sorted(p.name for p in step.iterdir() if (p / METADATA_FILE).is_file())
        raise CheckpointError(
            f"{step} has no model {role!r}; it has {', '.join(have)}: choose with --role"
        )
    if state.get("base_weights", {}).get(role):
        raise CheckpointError(
            f"{step} has the {role}'s adapters alone ({role}.lora.rank "
            f"{state['config'][f'{role}.lora.rank']}), not the weights below them; the run writes "
            "the merged model to actor_hf/ and the adapters to actor_peft/ when it ends: start it "
            "again with trainer.total_steps at the step that it has reached"
        )
    kind: Format = "fsdp_dtensor" if state.get("format") == "fsdp_dtensor" else "torch_dist"
    return Place(format=kind, folder=folder, iteration=state.get("step"), role=role)
