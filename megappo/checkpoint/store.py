"""Saves and loads models, optimizers, schedulers and random streams of all ranks.

Each model has a folder of its own (`actor/`, `critic/`), with the optimizer state. Its format is
Megatron's torch_dist in a form that any layout reads, and under `parallel.fsdp` another one, see
`fsdp_dtensor`; neither loads where the other is in use. Random streams are a file a rank. What is
small and equal on all ranks (step, data position, KL controller, layout, config) is `state.json`.

A save has two parts. `begin` copies the state to host memory, with all ranks. A thread of each rank
then writes its files, and nothing communicates until `poll` finds that every rank is done and
publishes: index and small state, new name, `latest`. Between the two training may go on.
Left out: the copy under `parallel.fsdp`, where `begin` writes everything at once.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megappo.checkpoint import compare, layout, streams, torch_dist
from megappo.distributed.fsdp import is_sharded
from megappo.distributed.grad_sync import Trainable
from megappo.distributed.offload import Part, inner_optimizers, on_device
from megappo.distributed.parallel import (
    ParallelContext,
    all_gather_objects,
    any_rank,
    barrier,
)
from megappo.errors import CheckpointError, SaveError

logger = logging.getLogger(__name__)

_POLL_S = 2.0
"""Seconds between looks at whether all ranks have written."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that is complete, with what it cost."""

    step: int
    path: Path
    num_bytes: int
    """of all ranks"""
    write_s: float
    """from the copy to the last rank's last file, while training may have gone on"""


@dataclass(kw_only=True)
class _Save:
    """A save between `begin` and `poll`."""

    step: int
    temporary: Path
    state: Mapping[str, Any]
    snapshots: list[torch_dist.Snapshot]
    num_bytes: int
    started: float
    write_s: float = 0.0
    error: Exception | None = None
    thread: threading.Thread | None = None

    def write(self, extra: Callable[[], None]) -> None:
        try:
            extra()
            for snapshot in self.snapshots:
                snapshot.write()
        except Exception as error:
            self.error = _of_the_disk(error)  # told to all ranks and raised by `poll`
            logger.warning("a checkpoint's files could not be written", exc_info=error)
        self.write_s = time.perf_counter() - self.started


@dataclass(kw_only=True)
class CheckpointStore:
    """Checkpoints of one run."""

    folder: Path
    policy: layout.KeepPolicy
    context: ParallelContext
    _running: _Save | None = field(default=None, init=False, repr=False)

    @property
    def saving_step(self) -> int | None:
        """Step of a save that was begun and is not yet published; equal on all ranks."""
        return None if self._running is None else self._running.step

    def save(self, step: int, models: Mapping[str, Trainable], state: Mapping[str, Any]) -> Saved:
        """`begin` and `poll`, without anything in between. Collective over the world."""
        self.begin(step, models, state)
        saved = self.poll(wait=True)
        assert saved is not None
        return saved

    def begin(self, step: int, models: Mapping[str, Trainable], state: Mapping[str, Any]) -> None:
        """Copies the state and starts to write it. Collective over the world.

        Args:
            step: finished steps.
            models: name -> model with optimizer; each becomes a subfolder.
            state: JSON values, equal on all ranks.

        Raises:
            SaveError: the disk has too little room, or cannot be written; on all ranks.
            OffloadedError: a part of a model is in host memory.
        """
        assert self._running is None, "the save before must be polled until it is over"
        started = time.perf_counter()
        temporary = self.folder / f"{layout.step_name(step)}.saving"
        self._on_main(lambda: _make_folders(temporary, (*models, "rng")), step, temporary)
        if _format(models) == "fsdp_dtensor":
            snapshots, num_bytes = [], self._write_sharded(step, models, temporary)
        else:
            snapshots = [_copy_model(temporary / name, model) for name, model in models.items()]
            num_bytes = self._require_room(sum(s.num_bytes for s in snapshots), step, temporary)
        save = _Save(
            step=step,
            temporary=temporary,
            state={
                **state,
                "step": step,
                "layout": self._layout(),
                "device": self.context.device.type,
                "format": _format(models),
            },
            snapshots=snapshots,
            num_bytes=num_bytes,
            started=started,
        )
        rng = streams.capture()
        rng_file = temporary / "rng" / self._rng_name()
        save.thread = threading.Thread(
            target=save.write, args=(lambda: _write_streams(rng, rng_file),), daemon=True
        )
        save.thread.start()
        self._running = save

    def _write_sharded(self, step: int, models: Mapping[str, Trainable], temporary: Path) -> int:
        """Writes models under FSDP; bytes of all ranks. Collective over the world.

        Raises:
            SaveError: as `begin`.
        """
        # Here, because torch's distributed checkpoint takes a while to import.
        from megappo.checkpoint import fsdp_dtensor

        held = sum(fsdp_dtensor.held_bytes(model) for model in models.values())
        num_bytes = self._require_room(held, step, temporary)
        try:
            for name, model in models.items():
                model.settle()
                fsdp_dtensor.save(temporary / name, model)
        except SaveError as error:
            if self.context.is_main:  # later saves need the room
                shutil.rmtree(temporary, ignore_errors=True)
            raise SaveError(f"the checkpoint of step {step} {error}") from error
        return num_bytes

    def _require_room(self, held: int, step: int, temporary: Path) -> int:
        """Bytes of all ranks, once the disk has room for them. Collective over the world.

        Raises:
            SaveError: it has not.
        """
        num_bytes: int = sum(all_gather_objects(held, self.context.world_group))
        self._on_main(lambda: layout.check_space(self.folder, num_bytes), step, temporary)
        return num_bytes

    def poll(self, *, wait: bool) -> Saved | None:
        """Publishes a save whose files are all written; None if there is none.

        Collective over the world if there is a `saving_step`.

        Args:
            wait: until all ranks have written, however long it takes.

        Raises:
            SaveError: a rank could not write; the checkpoints before are as they were.
        """
        save = self._running
        if save is None:
            return None
        assert save.thread is not None
        # Ranks with little to write must not wait for the slowest in one collective.
        while wait and any_rank(save.thread.is_alive(), self.context):
            save.thread.join(_POLL_S)
        running = save.thread.is_alive()
        results = None if running else [snapshot.results for snapshot in save.snapshots]
        told = all_gather_objects(
            (running, _in_words(save.error), results), self.context.world_group
        )
        if any(running for running, _, _ in told):
            return None
        self._running = None
        self._raise_first([problem for _, problem, _ in told], save.step, save.temporary)
        final = self.folder / layout.step_name(save.step)
        self._on_main(
            lambda: self._publish(save, [results for _, _, results in told], final),
            save.step,
            save.temporary,
        )
        return Saved(step=save.step, path=final, num_bytes=save.num_bytes, write_s=save.write_s)

    def load(
        self, checkpoint: Path, models: Mapping[str, Trainable], *, seed: int
    ) -> dict[str, Any]:
        """Fills models, optimizers, schedulers and random streams; returns the small state.

        Collective over the world.

        Args:
            checkpoint: its folder.
            models: name -> model with optimizer.
            seed: of the random streams in another layout or on another kind of device, where those
                saved are not these ranks'.

        Raises:
            CheckpointError: another format, or parts are missing.
            OffloadedError: a part of a model is in host memory.
        """
        state = layout.read_state(checkpoint)
        compare.check_layout(state, self._layout(), checkpoint)
        compare.check_format(state, checkpoint, fsdp=_format(models) == "fsdp_dtensor")
        for name, model in models.items():
            if not (checkpoint / name).is_dir():
                raise CheckpointError(f"{checkpoint} has no folder {name}/: choose another one")
            _load_model(checkpoint / name, model)
        if compare.layout_changes(state, self._layout()) or compare.device_changes(
            state, self.context.device.type
        ):
            streams.restart(seed, state["step"])
        else:
            saved = torch.load(checkpoint / "rng" / self._rng_name(), weights_only=True)
            streams.restore(saved)
        barrier(self.context)
        return state

    def tidy(self) -> None:
        """Clears what killed saves of an earlier start have left; rank 0 alone.

        Not before all ranks have loaded: a folder may get its name back.
        """
        assert self._running is None, "the files of a save look like those of one that was killed"
        if self.context.is_main:
            self._remove_old(layout.tidy)

    def _publish(self, save: _Save, results: list[Any], final: Path) -> None:
        for number, snapshot in enumerate(save.snapshots):
            snapshot.finish([of_rank[number] for of_rank in results])
        layout.write_state(save.temporary, save.state)
        layout.publish(save.temporary, final)
        self._remove_old(layout.prune)

    def _remove_old(self, remove: Callable[[Path, layout.KeepPolicy], None]) -> None:
        try:
            remove(self.folder, self.policy)
        except (OSError, CheckpointError) as error:
            # The newest counts; what cannot be removed now is tried again after the next.
            logger.warning("old checkpoints could not be removed", exc_info=error)

    def _on_main(self, work: Callable[[], None], step: int, temporary: Path) -> None:
        """Rank 0 alone does it, and all ranks raise if it fails. Collective over the world."""
        error: Exception | None = None
        if self.context.is_main:
            try:
                work()
            except Exception as caught:
                error = _of_the_disk(caught)
                logger.warning("a checkpoint failed", exc_info=caught)
        told = all_gather_objects(_in_words(error), self.context.world_group)
        self._raise_first(told, step, temporary)

    def _raise_first(self, problems: list[str | None], step: int, temporary: Path) -> None:
        """Raises on all ranks what was told of one, after rank 0 has removed what was written."""
        rank = next((rank for rank, problem in enumerate(problems) if problem), None)
        if rank is None:
            return
        if self.context.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise SaveError(f"the checkpoint of step {step} failed on rank {rank}: {problems[rank]}")

    def _layout(self) -> dict[str, int]:
        return {name: getattr(self.context, name) for name in compare.LAYOUT_FIELDS}

    def _rng_name(self) -> str:
        return f"rank_{self.context.rank:05d}.pt"


def _of_the_disk(error: Exception) -> Exception:
    """What the disk said, which torch's writer covers with an error of its own about positions."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError):
            return inner
        inner = inner.__cause__ or inner.__context__
    return error


def _write_streams(rng: Mapping[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(rng, file)


def _in_words(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"


def _make_folders(temporary: Path, names: tuple[str, ...]) -> None:
    if temporary.exists():
        shutil.rmtree(temporary)
    for name in names:
        (temporary / name).mkdir(parents=True)


def _format(models: Mapping[str, Trainable]) -> compare.Format:
    found = {compare.format_of(fsdp=is_sharded(model.chunks[0])) for model in models.values()}
    assert len(found) == 1, f"the models of a run have one format, not {sorted(found)}"
    return found.pop()


_SAVED_PARTS: tuple[Part, ...] = ("params", "optimizer")


def _copy_model(folder: Path, model: Trainable) -> torch_dist.Snapshot:
    """A copy to write. Collective over the world."""
    with on_device(model.memory, *_SAVED_PARTS):
        # A gather that a step left to the next forward pass: a rank would write old weights.
        model.settle()
        return torch_dist.snapshot(folder, model)


def _load_model(folder: Path, model: Trainable) -> None:
    with on_device(model.memory, *_SAVED_PARTS):
        _read_model(folder, model)
    # Adam's step lies with the parameter groups, and a group may be empty on the rank that saved
    # them (experts, where the first stage has none).
    for optimizer in inner_optimizers(model.optimizer):
        for group in optimizer.param_groups:
            group["step"] = model.scheduler.num_steps


def _read_model(folder: Path, model: Trainable) -> None:
    # The scheduler adds loaded steps to those it has (optimizer_param_scheduler.py:384).
    model.scheduler.num_steps = 0
    if is_sharded(model.chunks[0]):
        from megappo.checkpoint import fsdp_dtensor

        fsdp_dtensor.load(folder, model)
    else:
        torch_dist.load(folder, model)
