"""Weights and optimizer state of a model in Megatron's torch_dist format, free of the layout.

Optimizer state is `fully_reshardable` always: moments and main weights lie under the parameter's
name in its own shape, so TP, PP, VPP, CP, EP, ETP and DP may change between save and load. Of the
rest of Megatron's optimizer state nothing is read: the settings of a parameter group come from the
config and the scheduler, and Adam's step is the scheduler's count. Where adapters are trained, the
frozen weights are left out: they are those of the model's folder.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from megappo.distributed.grad_sync import Trainable

SHARDING = "fully_reshardable"


@dataclass(kw_only=True)
class Snapshot:
    """A model's content in host memory, of this rank's files, on its way to the disk."""

    folder: Path
    num_bytes: int
    """that this rank writes"""
    _writer: Any
    _files: list[Any]
    _metadata: Any
    """rank 0's index of all files; None elsewhere"""
    _common: Mapping[str, Any]
    _results: list[Any] = field(default_factory=list)

    def write(self) -> None:
        """Writes and syncs this rank's files, and frees their copy. Any thread; no collective.

        Raises:
            OSError: the disk is full, say.
        """
        from megatron.core.dist_checkpointing.strategies.filesystem_async import (
            FileSystemWriterAsync,
        )

        # In place of processes forked for it (filesystem_async.py:257 of megatron-core 0.16.1):
        # a fork of a process whose gloo and CUDA threads hold locks may never come to an end.
        transforms = [self._writer.transforms] if hasattr(self._writer, "transforms") else []
        while self._files:
            outcome: queue.Queue[Any] = queue.Queue()
            running: queue.Queue[int] = queue.Queue()
            running.put(0)
            FileSystemWriterAsync.write_preloaded_data(
                transforms, 0, self._files.pop(), outcome, running, use_fsync=True
            )
            _, found = outcome.get()
            if isinstance(found, Exception):
                raise found
            self._results += found

    @property
    def results(self) -> list[Any]:
        """Where this rank's tensors lie; what `finish` needs of all ranks."""
        return self._results

    def finish(self, results: Sequence[list[Any]]) -> None:
        """Writes the index and what is common to all ranks. Rank 0 alone; no collective.

        Args:
            results: `results` of every rank.

        Raises:
            OSError: the disk is full, say.
        """
        from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

        with (self.folder / "common.pt").open("wb") as file:
            torch.save(self._common, file)
        self._writer.finish(self._metadata, list(results))
        save_config(CheckpointingConfig("torch_dist", 1), str(self.folder))


def snapshot(folder: Path, model: Trainable) -> Snapshot:
    """Copies to host memory what this rank writes of a model. Collective over the world.

    Host memory: 12 bytes a parameter of this rank's shard for main weight and moments, and the
    weight itself, on one DP rank of each shard; while copying so much on all of them.
    """
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from megatron.core.dist_checkpointing.strategies.state_dict_saver import (
        save_state_dict_async_plan,
    )
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreSavePlanner,
        _replace_state_dict_keys_with_sharded_keys,
        mcore_to_pyt_state_dict,
    )

    # Megatron's own steps (serialization.py:394, strategies/torch.py:654), apart from each other
    # so that a rank which cannot write tells the others instead of leaving them in a collective.
    _keep_results_in_process()
    _make_moments(model)
    state = _sharded_state(model, is_loading=False)
    state["content_metadata"] = {k: v for k, v in _metadata().items() if k != "dp_cp_group"}
    sharded, common = save_preprocess(state)
    sharded, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    writer = FileSystemWriterAsync(str(folder), thread_count=1)
    (_, metadata, _), *_ = save_state_dict_async_plan(
        mcore_to_pyt_state_dict(sharded, False),
        writer,
        None,
        0,
        planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
    )
    files = [_copied(file, model) for file in writer.preload_tensors(writer.write_buckets or [])]
    writer.write_buckets = None  # the same tensors, which `write` lets go one by one
    return Snapshot(
        folder=folder,
        num_bytes=sum(_num_bytes(file) for file in files),
        _writer=writer,
        _files=files,
        _metadata=metadata,
        _common=common,
    )


def _make_moments(model: Trainable) -> None:
    """Moments of zero where no step was taken yet, as under critic warm-up.

    Without them Megatron's save fails (distrib_optimizer.py:1069 of megatron-core 0.16.1).
    """
    for optimizer in _optimizers(model):
        if optimizer.optimizer.state:
            continue
        optimizer.load_state_dict(optimizer.state_dict())  # allocates
        for moments in optimizer.optimizer.state.values():
            for value in moments.values():
                value.zero_()


def _copied(file: Any, model: Trainable) -> Any:
    """A file's content without memory that training goes on to change."""
    path, key, (objects, tensors) = file
    live = {
        t.untyped_storage().data_ptr()
        for chunk in model.chunks
        for t in (*chunk.module.parameters(), *chunk.module.buffers())
    }
    return (
        path,
        key,
        (
            objects,
            [
                (item, t.clone() if t.untyped_storage().data_ptr() in live else t)
                for item, t in tensors
            ],
        ),
    )


def _num_bytes(file: Any) -> int:
    _, _, (objects, tensors) = file
    sizes = [data.getbuffer().nbytes for _, data in objects] + [t.nbytes for _, t in tensors]
    return int(sum(sizes))


def load(folder: Path, model: Trainable) -> None:
    """Fills weights, optimizer and scheduler, whatever layout wrote them.

    Collective over the world.
    """
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(_sharded_state(model, is_loading=True), str(folder))
    for key, chunk in zip(_chunk_keys(model), model.chunks, strict=True):
        _fill(chunk.module, state[key])
    for number, optimizer in enumerate(_optimizers(model)):
        optimizer.load_state_dict(
            {
                **optimizer.state_dict(),
                "param_state": state["moments"].get(number, {}),
                "param_state_sharding_type": SHARDING,
            }
        )
    model.scheduler.load_state_dict(state["scheduler"])


def _fill(chunk: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Every trained tensor from the checkpoint; frozen ones are not in it."""
    trained = {name for name, p in chunk.named_parameters() if p.requires_grad}
    is_whole = len(trained) == sum(1 for _ in chunk.parameters())
    missing, unknown = chunk.load_state_dict(state, strict=is_whole)
    assert not unknown, f"the checkpoint has {unknown}, which this model has not"
    assert trained.isdisjoint(missing), f"the checkpoint lacks {sorted(trained & set(missing))}"


def _trained_alone(chunk: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Without what stays as the model's folder has it, where adapters are trained."""
    if all(p.requires_grad for p in chunk.parameters()):
        return state
    return {
        key: value
        for key, value in state.items()
        if getattr(getattr(value, "data", None), "requires_grad", False)
    }


def _metadata() -> dict[str, Any]:
    from megatron.core import parallel_state

    return {
        "distrib_optim_sharding_type": SHARDING,
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _chunk_keys(model: Trainable) -> list[str]:
    """Where Megatron's optimizers look for the chunks: `model`, or `model0` and on for several."""
    count = len(model.chunks)
    return ["model"] if count == 1 else [f"model{i}" for i in range(count)]


def _sharded_state(model: Trainable, *, is_loading: bool) -> dict[str, Any]:
    """What is stored, as Megatron's sharded tensors. Collective over DP."""
    metadata = _metadata()
    state: dict[str, Any] = {
        key: _trained_alone(chunk.module, chunk.module.sharded_state_dict(metadata=metadata))
        for key, chunk in zip(_chunk_keys(model), model.chunks, strict=True)
    }
    # Not the optimizer's `sharded_state_dict`: it adds the settings of parameter groups, of which
    # another layout has another number, and collects all garbage, which takes longer than the rest.
    # A key of its own, because checkpoints before this one have those settings as `optimizer`.
    moments = {}
    with _places_without_padding(model):
        for number, optimizer in enumerate(_optimizers(model)):
            if is_loading:
                optimizer.load_state_dict(optimizer.state_dict())  # allocates
            moments[number] = optimizer.sharded_param_state_fully_reshardable(
                state, is_loading, metadata
            )
    state["moments"] = moments
    state["scheduler"] = model.scheduler.state_dict()
    return state


def _optimizers(model: Trainable) -> list[Any]:
    """Megatron's optimizers of this rank; the experts of a mixture have their own."""
    from megatron.core.optimizer import ChainedOptimizer

    whole = model.optimizer
    parts = whole.chained_optimizers if isinstance(whole, ChainedOptimizer) else [whole]
    return [part for part in parts if not part.is_stub_optimizer]


@contextmanager
def _places_without_padding(model: Trainable) -> Iterator[None]:
    """Inside, buffers say where a parameter lies when the padding between buckets is left out.

    Megatron gathers optimizer state without that padding (distrib_optimizer.py:1110 of
    megatron-core 0.16.1) and then cuts it up by places that count it (:1470): with two buckets the
    second one's weights and moments would be saved shifted, without an error. A bucket is padded
    where its size is no multiple of 128 and DP; a tied embedding on the last stage has one of its
    own.
    """
    buffers = [
        buffer
        for chunk in model.chunks
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    places = [buffer.param_index_map for buffer in buffers]
    for buffer in buffers:
        buffer.param_index_map = _unpadded_places(buffer)
    try:
        yield
    finally:
        for buffer, before in zip(buffers, places, strict=True):
            buffer.param_index_map = before


def _unpadded_places(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
    before = [0, *accumulate(padding)]
    return {
        parameter: (start - before[bucket], end - before[bucket], bucket)
        for parameter, (start, end, bucket) in buffer.param_index_map.items()
    }


def _keep_results_in_process() -> None:
    """Gives Megatron's writer a plain queue for its results.

    By itself it starts a Manager process for that (filesystem_async.py:55 of megatron-core 0.16.1),
    seconds at the first save, which outlives a rank that is killed. Nothing is ever put into it.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
