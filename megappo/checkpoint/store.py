"""Saves and loads models, optimizers, schedulers and random streams of all ranks.

Each model has a folder of its own (`actor/`, `critic/`), with the optimizer state. Its format is
Megatron's torch_dist, optimizer state fully reshardable, and under `parallel.fsdp` another one, see
`fsdp_dtensor`; neither loads where the other is in use. Random streams are a file a rank. What is
small and equal on all ranks (step, data position, KL controller, layout, format) is `state.json`.
Left out: resuming in another layout, and writing while training goes on.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch

from megappo.checkpoint import layout
from megappo.distributed.fsdp import is_sharded
from megappo.distributed.grad_sync import Trainable
from megappo.distributed.offload import Part, inner_optimizers, on_device
from megappo.distributed.parallel import ParallelContext, all_ranks_or_none, barrier
from megappo.errors import CheckpointError

LAYOUT_FIELDS = ("world_size", "tp", "pp", "vp", "cp", "ep", "etp", "dp")

Format = Literal["torch_dist", "fsdp_dtensor"]


@dataclass(frozen=True, kw_only=True)
class CheckpointStore:
    """Checkpoints of one run."""

    folder: Path
    keep: int
    context: ParallelContext

    def save(self, step: int, models: Mapping[str, Trainable], state: Mapping[str, Any]) -> Path:
        """Writes a checkpoint and makes it the latest. Collective over the world.

        Args:
            step: finished steps.
            models: name -> model with optimizer; each becomes a subfolder.
            state: JSON values, equal on all ranks.

        Raises:
            OffloadedError: a part of a model is in host memory.
        """
        temporary = self.folder / f"{layout.step_name(step)}.saving"
        with all_ranks_or_none(self.context, "preparing a checkpoint"):
            if self.context.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
                for name in (*models, "rng"):
                    (temporary / name).mkdir(parents=True)
        for name, model in models.items():
            _save_model(temporary / name, model)
        with all_ranks_or_none(self.context, "writing a checkpoint"):
            torch.save(_random_streams(), temporary / "rng" / self._rng_name())
        final = self.folder / layout.step_name(step)
        with all_ranks_or_none(self.context, "publishing a checkpoint"):
            if self.context.is_main:
                whole = {
                    **state,
                    "step": step,
                    "layout": self._layout(),
                    "format": _format(models),
                }
                (temporary / layout.STATE_FILE).write_text(json.dumps(whole, indent=1))
                layout.publish(temporary, final)
                layout.prune(self.folder, self.keep)
        return final

    def load(self, checkpoint: Path, models: Mapping[str, Trainable]) -> dict[str, Any]:
        """Fills models, optimizers, schedulers and random streams; returns the small state.

        Collective over the world.

        Raises:
            CheckpointError: another layout or format, or parts are missing.
            OffloadedError: a part of a model is in host memory.
        """
        state = layout.read_state(checkpoint)
        check_layout(state, self._layout(), checkpoint)
        check_format(state, checkpoint, fsdp=_format(models) == "fsdp_dtensor")
        for name, model in models.items():
            if not (checkpoint / name).is_dir():
                raise CheckpointError(f"{checkpoint} has no folder {name}/: choose another one")
            _load_model(checkpoint / name, model)
        streams = torch.load(checkpoint / "rng" / self._rng_name(), weights_only=True)
        _set_random_streams(streams)
        barrier(self.context)
        return state

    def _layout(self) -> dict[str, int]:
        return {name: getattr(self.context, name) for name in LAYOUT_FIELDS}

    def _rng_name(self) -> str:
        return f"rank_{self.context.rank:05d}.pt"


def check_layout(state: Mapping[str, Any], now: Mapping[str, int], checkpoint: Path) -> None:
    """Refuses a checkpoint of another layout.

    Raises:
        CheckpointError: with the degrees of both.
    """
    # What an earlier version did not write: no chunks, and experts' degrees of a dense model.
    saved = {"vp": 1, "ep": 1, "etp": state["layout"]["tp"]} | state["layout"]
    differing = [f"{k} {saved[k]} -> {v}" for k, v in now.items() if saved[k] != v]
    if differing:
        raise CheckpointError(
            f"{checkpoint} was saved in another layout (checkpoint -> now): "
            f"{', '.join(differing)}; "
            "start as many ranks with the same parallel.* as then, or use a new trainer.run_dir"
        )


def check_format(state: Mapping[str, Any], checkpoint: Path, *, fsdp: bool) -> None:
    """Refuses a checkpoint whose weights and optimizer state are of the other format.

    Args:
        state: of `layout.read_state`; without `format` it is from before there were two.
        checkpoint: its folder, for the message.
        fsdp: whether the run that wants to load it has `parallel.fsdp`.

    Raises:
        CheckpointError: with both formats and what to change.
    """
    saved, needed = state.get("format", "torch_dist"), format_of(fsdp=fsdp)
    if saved != needed:
        raise CheckpointError(
            f"{checkpoint} has the format {saved}, but parallel.fsdp is {str(fsdp).lower()}, which "
            f"reads {needed}; set parallel.fsdp={str(saved == 'fsdp_dtensor').lower()} as when it "
            "was saved, or use a new trainer.run_dir"
        )


def format_of(*, fsdp: bool) -> Format:
    """How models are stored with and without `parallel.fsdp`."""
    return "fsdp_dtensor" if fsdp else "torch_dist"


def _format(models: Mapping[str, Trainable]) -> Format:
    found = {format_of(fsdp=is_sharded(model.chunks[0])) for model in models.values()}
    assert len(found) == 1, f"the models of a run have one format, not {sorted(found)}"
    return found.pop()


def model_identity(spec: Any) -> dict[str, Any]:
    """What must not change between a checkpoint and a resumed run, as JSON values."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(spec), default=str))
    return values


def _metadata() -> dict[str, Any]:
    from megatron.core import parallel_state

    return {
        "distrib_optim_sharding_type": "fully_reshardable",
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
    metadata = _metadata()
    state: dict[str, Any] = {
        key: chunk.module.sharded_state_dict(metadata=metadata)
        for key, chunk in zip(_chunk_keys(model), model.chunks, strict=True)
    }
    with _places_without_padding(model):
        state["optimizer"] = model.optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata=metadata
        )
    state["scheduler"] = model.scheduler.state_dict()
    return state


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


_SAVED_PARTS: tuple[Part, ...] = ("params", "optimizer")


def _save_model(folder: Path, model: Trainable) -> None:
    with on_device(model.memory, *_SAVED_PARTS):
        _write_model(folder, model)


def _write_model(folder: Path, model: Trainable) -> None:
    # A gather that a step left to the next forward pass: a rank would write old weights.
    model.settle()
    if is_sharded(model.chunks[0]):
        # Here, because torch's distributed checkpoint takes a while to import.
        from megappo.checkpoint import fsdp_dtensor

        fsdp_dtensor.save(folder, model)
    else:
        _save_torch_dist(folder, model)


def _save_torch_dist(folder: Path, model: Trainable) -> None:
    from megatron.core import dist_checkpointing

    _keep_results_in_process()
    content = {k: v for k, v in _metadata().items() if k != "dp_cp_group"}
    dist_checkpointing.save(
        _sharded_state(model, is_loading=False), str(folder), content_metadata=content
    )


def _keep_results_in_process() -> None:
    """Gives Megatron's writer a plain queue for its results.

    By itself it starts a Manager process for that (filesystem_async.py:55 of megatron-core 0.16.1),
    seconds at the first save, which outlives a rank that is killed. A save that blocks reads the
    results in the process that wrote them, so a queue of that process is enough.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def _load_model(folder: Path, model: Trainable) -> None:
    with on_device(model.memory, *_SAVED_PARTS):
        _read_model(folder, model)
    # Megatron keeps Adam's step with the parameter groups, which come from rank 0. A group that is
    # empty there (experts, where the first stage has none) has no step; others would start anew.
    for optimizer in inner_optimizers(model.optimizer):
        for group in optimizer.param_groups:
            if model.scheduler.num_steps:
                group["step"] = model.scheduler.num_steps


def _read_model(folder: Path, model: Trainable) -> None:
    # The scheduler adds loaded steps to those it has (optimizer_param_scheduler.py:384).
    model.scheduler.num_steps = 0
    if is_sharded(model.chunks[0]):
        from megappo.checkpoint import fsdp_dtensor

        fsdp_dtensor.load(folder, model)
    else:
        _load_torch_dist(folder, model)


def _load_torch_dist(folder: Path, model: Trainable) -> None:
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(_sharded_state(model, is_loading=True), str(folder))
    for key, chunk in zip(_chunk_keys(model), model.chunks, strict=True):
        chunk.module.load_state_dict(state[key], strict=True)
    model.optimizer.load_state_dict(state["optimizer"])
    model.scheduler.load_state_dict(state["scheduler"])


def _random_streams() -> dict[str, Any]:
    from megatron.core import tensor_parallel

    streams = {
        "torch": torch.get_rng_state(),
        "megatron": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }
    if torch.cuda.is_available():
        streams["cuda"] = torch.cuda.get_rng_state()
    return streams


def _set_random_streams(streams: Mapping[str, Any]) -> None:
    from megatron.core import tensor_parallel

    torch.set_rng_state(streams["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(streams["megatron"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(streams["cuda"])
