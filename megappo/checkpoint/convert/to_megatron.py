"""Hugging Face to Megatron's torch_dist format.

The checkpoint has every tensor whole, so any layout loads it. The layout that is asked for decides
how the files are cut: each pipeline stage has files of its own, and within them each tensor- and
expert-parallel rank has one, so that a rank of that layout reads its own file and the first one of
its stage, which has what all ranks share. Another layout reads more files, and the same weights.

Layers are joined into one tensor (`decoder.layers.…`, first dim the layer) where all are alike, as
Megatron does by default. Models with experts have a tensor a layer; `content_metadata` in
`common.pt` says which of the two it is, and Megatron-LM loads by it. Names are those of the
Transformer Engine spec, under which the local spec saves too. `_extra_state` is empty for every
module of either spec: the strict load asks for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megappo.checkpoint.convert.checkpoint import full_shape, parameters
from megappo.checkpoint.convert.file_layout import Layout
from megappo.checkpoint.convert.hf_source import HFTensors
from megappo.checkpoint.convert.megatron_arguments import megatron_arguments
from megappo.checkpoint.convert.output import (
    Progress,
    check_output,
    check_space,
    new_folder,
    size_text,
)
from megappo.checkpoint.convert.place import RELEASE, TRACKER_FILE
from megappo.checkpoint.convert.raw import BLOCK_BYTES, num_bytes
from megappo.checkpoint.convert.rules import BUFFER_RULE, MTP_RULE, given_dtype
from megappo.checkpoint.convert.torch_dist_writer import (
    ARCHIVE_BYTES,
    DistcpFiles,
    Written,
    saved_bytes,
    write_metadata,
)
from megappo.checkpoint.convert.workers import Report, run_jobs
from megappo.errors import ModelError
from megappo.models.build import chunk_layers
from megappo.models.name_map import EMBEDDING, LM_HEAD, VALUE_HEAD, Entry, Head
from megappo.models.spec import ModelSpec, load_spec
from megappo.models.weights import check_names, dropped_names, read_shard

VOCAB_MULTIPLE = 128
"""Megatron-LM pads the vocabulary to a multiple of this times TP (its
`--make-vocab-size-divisible-by`); a load takes any padding."""

_EXPERT_MARK = ".mlp.experts.linear_fc"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that is known before a weight is read."""

    source: Path
    spec: ModelSpec
    head: Head
    layout: Layout
    dtype: torch.dtype | None
    """Of all tensors but buffers, None to keep each one's."""
    dtypes: dict[str, torch.dtype]
    """Of each parameter in the checkpoint, by canonical name."""
    parts: tuple[tuple[str, ...], ...]
    """Parameters that are written together, in files of their own."""
    dropped: tuple[str, ...]
    """Tensors of the folder that follow from others."""
    num_mtp: int
    """Tensors of layers that are declared dropped (`ModelSpec.dropped_layers`)."""

    @cached_property
    def total_bytes(self) -> int:
        """Of the tensors in the checkpoint, padding included."""
        table = parameters(self.spec, self.head)
        return sum(num_bytes(self.shape(table[name]), dtype) for name, dtype in self.dtypes.items())

    @property
    def needed_bytes(self) -> int:
        """Room on the disk: tensors, archives and metadata."""
        blocks = self.total_bytes // BLOCK_BYTES
        modules = 3 * len(self.dtypes)
        return self.total_bytes + 2 * ARCHIVE_BYTES * (
            len(self.dtypes) * self.layout.tp * 2 + blocks + modules
        )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""
        multiple = VOCAB_MULTIPLE * self.layout.tp
        return -(-self.spec.vocab_size // multiple) * multiple

    @cached_property
    def is_stacked(self) -> bool:
        """All layers have the same parameters, so each is one tensor over all layers."""
        rests = [set[str]() for _ in range(self.spec.num_layers)]
        for name in parameters(self.spec, self.head):
            if name.startswith("decoder.layers."):
                layer, rest = name.removeprefix("decoder.layers.").split(".", 1)
                rests[int(layer)].add(rest)
        return self.spec.num_experts == 0 and all(rest == rests[0] for rest in rests)

    def shape(self, entry: Entry) -> tuple[int, ...]:
        """Of a parameter in the checkpoint."""
        rows = full_shape(entry)
        return (self.padded_vocab_size, *rows[1:]) if entry.kind == "vocab" else rows

    def lines(self) -> list[str]:
        """What will be done, for a person."""
        kinds = Counter(str(dtype).removeprefix("torch.") for dtype in self.dtypes.values())
        counted = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        lines = [
            f"from       {self.source}: {self.spec.model_type}, {self.spec.num_layers} layers, "
            f"{'value' if self.head == 'value' else 'language-model'} head",
            f"to         torch_dist, files for tp {self.layout.tp}, pp {self.layout.pp}, "
            f"ep {self.layout.ep}; any layout loads them",
            f"parameters {len(self.dtypes)} ({counted}), "
            f"{'one tensor for all layers' if self.is_stacked else 'a tensor for each layer'}",
            f"vocabulary {self.spec.vocab_size} rows, padded to {self.padded_vocab_size}",
        ]
        lines += [f"dropped    {name} (follows from the other tensors)" for name in self.dropped]
        if self.num_mtp:
            lines.append(f"dropped    {self.num_mtp} tensors of {MTP_RULE}")
        if self.dtype not in (None, torch.float32):
            kept = sum(e.is_buffer for e in parameters(self.spec, self.head).values())
            lines += [f"kept       {kept} {BUFFER_RULE}"] if kept else []
        return [*lines, f"size       {size_text(self.total_bytes)}"]


def plan(
    source: str | Path,
    *,
    layout: Layout,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 10**9,
    trust_remote_code: bool = False,
) -> Plan:
    """Reads config.json and the headers of the weights, and checks both.

    Args:
        source: The Hugging Face folder.
        layout: That the files are cut for.
        dtype: Of all tensors but buffers, None to keep each one's.
        max_file_bytes: Largest size of the parameters that are written together.
        trust_remote_code: As `load_spec` takes it.

    Raises:
        ModelError: the folder is damaged, or is of a model that is not supported, or the layout
            does not fit it.
    """
    source = Path(source)
    spec = load_spec(source, trust_remote_code=trust_remote_code)
    layout.check(spec)
    with HFTensors(source) as tensors:
        head: Head = "value" if VALUE_HEAD in tensors.names() else "lm"
        expected = check_names(tensors, spec, head)
        table = parameters(spec, head)
        dtypes = {
            name: given_dtype(entry, dtype) or _common_dtype(tensors, entry)
            for name, entry in table.items()
        }
        mtp = dropped_names(tensors, spec)
        dropped = tuple(sorted(tensors.names() - expected.keys() - mtp))
        if head == "lm" and LM_HEAD in dropped:
            _check_tied_head(tensors)
    made = Plan(
        source=source,
        spec=spec,
        head=head,
        layout=layout,
        dtype=dtype,
        dtypes=dtypes,
        parts=(),
        dropped=dropped,
        num_mtp=len(mtp),
    )
    sizes = {name: num_bytes(made.shape(table[name]), dtypes[name]) for name in table}
    parts = _split(list(table), sizes, spec, layout.pp, max_file_bytes)
    return replace(made, parts=parts)


def convert(
    made: Plan, out: Path, *, overwrite: bool, num_workers: int, progress: Progress
) -> None:
    """Writes the checkpoint `out/release` and the file that names it.

    Raises:
        CheckpointError: `out` exists, or the disk has not enough room.
    """
    check_output(out, overwrite=overwrite, sources=(made.source,))
    check_space(out, made.needed_bytes)
    with new_folder(out) as folder:
        release = folder / RELEASE
        release.mkdir()
        jobs = [Job(plan=made, part=i, folder=release) for i in range(len(made.parts))]
        written = run_jobs(write_part, jobs, num_workers=num_workers, progress=progress)
        write_metadata(release, [item for found in written for item in found], _common(made))
        (folder / TRACKER_FILE).write_text(RELEASE)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One part, for one process."""

    plan: Plan
    part: int
    folder: Path


def write_part(job: Job, report: Report) -> list[Written]:
    """Writes the files of a part, a chunk at a time; returns what is in them."""
    made = job.plan
    table = parameters(made.spec, made.head)
    with HFTensors(made.source) as tensors, DistcpFiles(job.folder, job.part) as files:
        for name in made.parts[job.part]:
            entry = table[name]
            key, index, counts = _disk_key(name, made)
            shape = (*counts, *made.shape(entry))
            for tp_rank, offsets, chunk in _chunks(tensors, entry, made):
                chunk = chunk.to(made.dtypes[name]).reshape((1,) * len(index) + chunk.shape)
                slot = tp_rank + made.layout.tp * _ep_rank(name, made)
                files.add(slot, key, shape, (*index, *offsets), chunk)
                report(chunk.nbytes)
        files.add_objects(_extra_states(made, made.parts[job.part]), saved_bytes([None]))
        return files.written


def _check_tied_head(tensors: HFTensors) -> None:
    """A head that is left out must be the embedding.

    Raises:
        ModelError: it is not.
    """
    pairs = zip(tensors.blocks(LM_HEAD), tensors.blocks(EMBEDDING), strict=False)
    same = tensors.shape(LM_HEAD) == tensors.shape(EMBEDDING)
    if not same or not all(torch.equal(head, embedding) for head, embedding in pairs):
        raise ModelError(
            f"{tensors.folder} has a {LM_HEAD} that is not the embedding, but config.json sets "
            "tie_word_embeddings, so it would be lost; remove the tensor, or set the key to false"
        )


def _common_dtype(tensors: HFTensors, entry: Entry) -> torch.dtype:
    """Of the tensors that make up a parameter; Megatron has one for all of them."""
    found = {tensors.dtype(name) for name, _ in entry.parts}
    if len(found) > 1:
        listed = ", ".join(f"{name} {tensors.dtype(name)}" for name, _ in entry.parts)
        raise ModelError(
            f"{tensors.folder}: tensors that are one parameter in Megatron have different types: "
            f"{listed}; choose one for all with --dtype"
        )
    return found.pop()


def _split(
    names: Sequence[str], sizes: dict[str, int], spec: ModelSpec, pp: int, max_bytes: int
) -> tuple[tuple[str, ...], ...]:
    """Parameters by pipeline stage, and those of a stage by size."""
    stage_of: list[int] = []
    for stage, count in enumerate(chunk_layers(spec.num_layers, pp=pp)):
        stage_of += [stage] * count
    parts: list[list[str]] = []
    last_stage, size = -1, 0
    for name in names:
        if name.startswith("decoder.layers."):
            stage = stage_of[int(name.split(".")[2])]
        else:
            stage = 0 if name.startswith("embedding.") else pp - 1
        if stage != last_stage or size + sizes[name] > max_bytes:
            parts.append([])
            last_stage, size = stage, 0
        parts[-1].append(name)
        size += sizes[name]
    return tuple(map(tuple, parts))


def _disk_key(name: str, made: Plan) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Name on disk, and index and count of layers and experts where they are dims."""
    index: list[int] = []
    counts: list[int] = []
    if name.startswith("decoder.layers.") and made.is_stacked:
        layer, rest = name.removeprefix("decoder.layers.").split(".", 1)
        name = f"decoder.layers.{rest}"
        index.append(int(layer))
        counts.append(made.spec.num_layers)
    if _EXPERT_MARK in name:
        base = name.rstrip("0123456789")
        index.append(int(name[len(base) :]))
        counts.append(made.spec.num_experts)
        name = base.replace(".mlp.experts.", ".mlp.experts.experts.")
    return name, tuple(index), tuple(counts)


def _ep_rank(name: str, made: Plan) -> int:
    if _EXPERT_MARK not in name:
        return 0
    expert = int(name[len(name.rstrip("0123456789")) :])
    return expert // (made.spec.num_experts // made.layout.ep)


def _chunks(
    tensors: HFTensors, entry: Entry, made: Plan
) -> Iterator[tuple[int, tuple[int, ...], Tensor]]:
    """TP rank, offsets and content of the boxes of one parameter, one at a time."""
    tp = 1 if entry.tp_dim is None else made.layout.tp
    shape = made.shape(entry)
    zeros = (0,) * (len(shape) - 1)
    if entry.kind == "vocab":
        yield from _vocab_chunks(tensors, entry, made)
    elif entry.kind == "gate_up":
        for i, (name, (rows, *_)) in enumerate(entry.parts):
            size = rows // tp
            for rank in range(tp):
                part = tensors.read(name, start=rank * size, stop=(rank + 1) * size)
                yield rank, (i * rows + rank * size, *zeros), part
    elif entry.tp_dim is None or tp == 1:
        yield 0, (0, *zeros), read_shard(tensors, entry, made.spec, 1, 0)
    else:
        full = read_shard(tensors, entry, made.spec, 1, 0)
        size = shape[entry.tp_dim] // tp
        for rank in range(tp):
            offsets = [0] * len(shape)
            offsets[entry.tp_dim] = rank * size
            yield rank, tuple(offsets), full.narrow(entry.tp_dim, rank * size, size)


def _vocab_chunks(
    tensors: HFTensors, entry: Entry, made: Plan
) -> Iterator[tuple[int, tuple[int, ...], Tensor]]:
    ((name, (rows, columns)),) = entry.parts
    size = made.padded_vocab_size // made.layout.tp
    step = max(1, BLOCK_BYTES // num_bytes((columns,), tensors.dtype(name)))
    for rank in range(made.layout.tp):
        for start in range(rank * size, (rank + 1) * size, step):
            stop = min(start + step, (rank + 1) * size)
            real = tensors.read(name, start=min(start, rows), stop=min(stop, rows))
            if len(real) < stop - start:
                real = torch.cat([real, real.new_zeros(stop - start - len(real), columns)])
            yield rank, (start, 0), real


def _extra_states(made: Plan, names: Sequence[str]) -> list[str]:
    """Keys of the empty state that modules of either spec ask for."""
    keys: dict[str, None] = {}
    for name in names:
        if not name.startswith("decoder."):
            continue
        key, index, counts = _disk_key(name, made)
        module = key.rpartition(".")[0]
        if module.endswith(".router"):
            continue
        modules = [module]
        if module.endswith(".self_attention.linear_proj"):
            modules.append(module.replace("linear_proj", "core_attention"))
        place = ".".join(map(str, index)) or "0"
        of = ".".join(map(str, counts)) or "1"
        keys |= {f"{m}._extra_state/shard_{place}_{of}": None for m in modules}
    return list(keys)


def _common(made: Plan) -> dict[str, Any]:
    """What Megatron-LM reads first: version, how layers are stored, and its own arguments."""
    return {
        "args": megatron_arguments(
            made.spec,
            made.layout,
            padded_vocab_size=made.padded_vocab_size,
            vocab_multiple=VOCAB_MULTIPLE,
        ),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": {
            "non_homogeneous_layers": not made.is_stacked,
            "singleton_local_shards": False,
        },
    }
