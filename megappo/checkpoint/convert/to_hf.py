"""Megatron to Hugging Face: weights of a checkpoint, other files from the model's own folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megappo.checkpoint.convert.checkpoint import CheckpointTensors
from megappo.checkpoint.convert.hf_writer import File, Planned, plan_files, write_file, write_index
from megappo.checkpoint.convert.output import (
    Progress,
    check_output,
    check_space,
    new_folder,
    size_text,
)
from megappo.checkpoint.convert.place import Place
from megappo.checkpoint.convert.rules import BUFFER_RULE, MTP_RULE, given_dtype
from megappo.checkpoint.convert.workers import Report, run_jobs
from megappo.models.hf_folder import WEIGHT_SUFFIXES, copy_side_files, write_config
from megappo.models.name_map import Head, hf_names
from megappo.models.spec import ModelSpec, load_spec


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that is known before a weight is read."""

    place: Place
    like: Path
    """The model's Hugging Face folder."""
    spec: ModelSpec
    head: Head
    files: tuple[File, ...]
    num_dropped: int
    """Tensors on disk that are no weights."""
    num_mtp: int
    """Tensors on disk of layers that are declared dropped (`ModelSpec.dropped_layers`)."""
    kept_buffers: int
    """Tensors that stay float32 though another dtype was asked for."""

    @property
    def total_bytes(self) -> int:
        """Of the tensors."""
        return sum(t.num_bytes for file in self.files for t in file.tensors)

    @property
    def needed_bytes(self) -> int:
        """Room on the disk: tensors, headers and side files."""
        side = sum(p.stat().st_size for p in self.like.iterdir() if p.is_file() and _is_side(p))
        return self.total_bytes + sum(len(file.header()) for file in self.files) + side

    @property
    def dtype(self) -> torch.dtype:
        """That most bytes have; what config.json calls the model's."""
        sizes: Counter[torch.dtype] = Counter()
        for file in self.files:
            for tensor in file.tensors:
                sizes[tensor.dtype] += tensor.num_bytes
        return sizes.most_common(1)[0][0]

    def lines(self) -> list[str]:
        """What will be done, for a person."""
        kinds = Counter(str(t.dtype).removeprefix("torch.") for f in self.files for t in f.tensors)
        counted = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        step = "" if self.place.iteration is None else f", iteration {self.place.iteration}"
        lines = [
            f"from       {self.place.folder}: {self.place.format}{step}, "
            f"{'value' if self.head == 'value' else 'language-model'} head",
            f"like       {self.like}: {self.spec.model_type}, {self.spec.num_layers} layers",
            f"tensors    {sum(kinds.values())} ({counted}) in {len(self.files)} files",
        ]
        if self.num_dropped:
            lines.append(
                f"dropped    {self.num_dropped} tensors of the optimizer and random streams"
            )
        if self.num_mtp:
            lines.append(f"dropped    {self.num_mtp} tensors of {MTP_RULE}")
        if self.kept_buffers:
            lines.append(f"kept       {self.kept_buffers} {BUFFER_RULE}")
        return [*lines, f"size       {size_text(self.total_bytes)}"]


def plan(
    place: Place,
    like: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 10**9,
    trust_remote_code: bool = False,
) -> Plan:
    """Reads the checkpoint's metadata and compares it with the model.

    Args:
        place: The checkpoint.
        like: The model's Hugging Face folder.
        dtype: Of all tensors but buffers, None to keep each one's.
        max_file_bytes: Largest size of a weights file, unless one tensor alone is larger.
        trust_remote_code: As `load_spec` takes it.

    Raises:
        UserError: `like` is damaged or of another model, or the checkpoint is damaged.
    """
    like = Path(like)
    spec = load_spec(like, trust_remote_code=trust_remote_code)
    with CheckpointTensors(place, spec) as tensors:
        planned = [
            Planned(
                name=name,
                shape=tensors.shape(name),
                dtype=given_dtype(tensors.entry(name), dtype) or tensors.dtype(name),
            )
            for name in tensors.names()
        ]
        buffers = sum(tensors.entry(name).is_buffer for name in tensors.names())
        expected = hf_names(spec, head=tensors.head)
        assert {p.name: p.shape for p in planned} == expected
        return Plan(
            place=place,
            like=like,
            spec=spec,
            head=tensors.head,
            files=tuple(plan_files(planned, max_file_bytes)),
            num_dropped=len(tensors.unused),
            num_mtp=len(tensors.mtp),
            kept_buffers=buffers if dtype not in (None, torch.float32) else 0,
        )


def convert(
    made: Plan, out: Path, *, overwrite: bool, num_workers: int, progress: Progress
) -> None:
    """Writes the folder.

    Raises:
        CheckpointError: `out` exists, or the disk has not enough room.
    """
    check_output(out, overwrite=overwrite, sources=(made.place.folder, made.like))
    check_space(out, made.needed_bytes)
    with new_folder(out) as folder:
        copy_side_files(made.like, folder)
        changed = made.head == "value" or str(made.dtype) != f"torch.{made.spec.dtype}"
        if changed or made.spec.dropped_layers:
            write_config(made.like, folder, made.dtype, made.head)
        jobs = [Job(plan=made, file=i, folder=folder) for i in range(len(made.files))]
        run_jobs(write_weights, jobs, num_workers=num_workers, progress=progress)
        write_index(folder, made.files)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One file, for one process."""

    plan: Plan
    file: int
    folder: Path


def write_weights(job: Job, report: Report) -> None:
    """Writes one file, a tensor at a time."""
    file = job.plan.files[job.file]
    with CheckpointTensors(job.plan.place, job.plan.spec) as tensors:

        def blocks() -> Iterator[tuple[str, Iterator[torch.Tensor]]]:
            for planned in file.tensors:
                yield planned.name, tensors.blocks(planned.name)

        for count in write_file(job.folder, file, blocks()):
            report(count)


def _is_side(path: Path) -> bool:
    return not path.name.endswith(WEIGHT_SUFFIXES)
