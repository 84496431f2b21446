"""When checkpoints are written, and what is done about one that cannot be.

One save is under way at a time. It is looked at after each step, and published once all ranks have
written their files. A save that failed is an event and a warning, and is tried again after the next
step; at the end of a run there is no next step, so there it is tried once more and then an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megappo.checkpoint import layout
from megappo.checkpoint.store import CheckpointStore, Saved
from megappo.config.sections import CheckpointSection
from megappo.distributed.grad_sync import Trainable
from megappo.distributed.host_memory import available_bytes
from megappo.distributed.offload import on_device
from megappo.distributed.parallel import ParallelContext, any_rank
from megappo.distributed.rank_check import non_finite
from megappo.errors import GuardStop, SaveError
from megappo.trainer.resources import GIB

_BYTES_A_PARAMETER = 12
"""Main weight and two moments in float32; the weight itself comes on top."""


@dataclass(kw_only=True)
class Saver:
    """Saves of one run. Its methods are collective over the world."""

    store: CheckpointStore
    settings: CheckpointSection
    models: Mapping[str, Trainable]
    context: ParallelContext
    ranks_on_node: int
    save_freq: int
    """steps; 0: only at the end"""
    state: Callable[[], Mapping[str, Any]]
    """the small state as it is now"""
    say: Callable[[str], None]
    event: Callable[..., None]
    saved_step: int | None = None
    """of the newest checkpoint that is known to be whole"""
    _failures: int = field(default=0, init=False)
    _is_overdue: bool = field(default=False, init=False)
    _blocked_s: float = field(default=0.0, init=False)
    _scores: dict[int, float] = field(default_factory=dict, init=False)
    """of validations by step, for states that are saved anew after the run went back to them"""
    _unvalidated: dict[int, Mapping[str, float]] = field(default_factory=dict, init=False)
    """of steps whose validation is still due"""

    def publish(self) -> None:
        """Publishes a save that all ranks have written, so that it counts from then on.

        Raises:
            SaveError: it failed, and `checkpoint.on_failure` is stop.
        """
        with self._timed():
            self._poll(wait=False)

    def after_step(self, step: int, *, val_score: float | None, must: bool = False) -> None:
        """Publishes a save that is written; begins the one that is due.

        Args:
            step: finished steps.
            val_score: of the validation after this step, if there was one.
            must: begin one also where none is due.

        Raises:
            SaveError: it failed, and `checkpoint.on_failure` is stop.
            GuardStop: weights or moments are not finite.
        """
        self.note_score(step, val_score)
        with self._timed():
            self._poll(wait=False)
            is_due = self.save_freq > 0 and step % self.save_freq == 0
            if must or self._is_overdue or is_due:
                self._poll(wait=True)
                self._begin(step)

    def note_score(self, step: int, val_score: float | None) -> None:
        """What the validation after a step gave, if there was one; the step's checkpoint keeps it.

        A saved step that is resumed from, or gone back to, is not validated again.
        """
        if val_score is not None:
            self._scores[step] = val_score

    def note_unvalidated(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is saved before the validation that is due; its checkpoint keeps the metrics."""
        self._unvalidated[step] = dict(metrics)

    def save_now(self, step: int, *, val_score: float | None = None) -> None:
        """The state as it is, written when this returns; nothing to do if it is saved already.

        Raises:
            SaveError: twice, or once where `checkpoint.on_failure` is stop.
            GuardStop: weights or moments are not finite.
        """
        self.note_score(step, val_score)
        with self._timed():
            self._poll(wait=True)
            for _ in range(2):
                if self.saved_step != step:
                    self._begin(step)
                    self._poll(wait=True)
        if self.saved_step != step:
            raise SaveError(f"the state of step {step} is not saved; {self._last_in_words()}")

    def save_anew(self, step: int) -> None:
        """Saves the state that the run went back to; one that fails is tried after the next step.

        Raises:
            SaveError: it failed, and `checkpoint.on_failure` is stop.
        """
        with self._timed():
            self._begin(step)
            self._poll(wait=True)

    def finish(self) -> None:
        """Waits for the save that is under way, if any."""
        with self._timed():
            self._poll(wait=True)

    def finish_earlier(self) -> None:
        """The same, of a step when all was well: why the run ends matters more than a failure."""
        try:
            self.finish()
        except SaveError as error:
            self.say(f"warning    {error}")

    def resumed(self, step: int) -> None:
        """All ranks have loaded the state of this step, with which the run begins."""
        self.saved_step = step
        self.store.tidy()

    def rewind(self, step: int) -> None:
        """The run went back to this step: it is saved anew, and so is what comes after it.

        The step's own checkpoint lacks what guards have changed since.
        """
        if self.saved_step is not None and self.saved_step >= step:
            self.saved_step = None
        self._scores = {at: score for at, score in self._scores.items() if at <= step}

    def take_metrics(self) -> dict[str, float]:
        """Seconds for which saves held up training since the last call, and failures so far."""
        blocked, self._blocked_s = self._blocked_s, 0.0
        return {"timing_s/save": blocked, "training/failed_saves": float(self._failures)}

    def _begin(self, step: int) -> None:
        self._require_finite(step)
        in_line = not self.settings.async_save or self._memory_is_short(step)
        try:
            state = {
                **self.state(),
                "val_score": self._scores.get(step),
                "unvalidated": self._unvalidated.get(step),
            }
            self.store.begin(step, self.models, state)
        except SaveError as error:
            self._note_failure(step, error)
            return
        if in_line:
            self._poll(wait=True)

    def _poll(self, *, wait: bool) -> None:
        step = self.store.saving_step
        if step is None:
            return
        try:
            saved = self.store.poll(wait=wait)
        except SaveError as error:
            self._note_failure(step, error)
            return
        if saved is not None:
            self._note_success(saved)

    def _note_success(self, saved: Saved) -> None:
        self.saved_step = saved.step
        self._is_overdue = False
        self.event(
            "saved",
            saved.step,
            path=str(saved.path),
            gb=saved.num_bytes / GIB,
            write_s=saved.write_s,
        )

    def _note_failure(self, step: int, error: SaveError) -> None:
        self._failures += 1
        self._is_overdue = True
        text = f"{error}; {self._last_in_words()}"
        if self.settings.on_failure == "continue":
            self.say(f"warning    {text}; it is tried again")
        self.event("save_failed", step, reason=str(error))
        if self.settings.on_failure == "stop":
            raise SaveError(text)

    def _last_in_words(self) -> str:
        last = layout.latest(self.store.folder)
        return "no checkpoint is there" if last is None else f"the last checkpoint is {last}"

    def _require_finite(self, step: int) -> None:
        for name, model in self.models.items():
            with on_device(model.memory, "params", "optimizer"):
                problem = non_finite(name, model.chunks, model.optimizer, self.context)
            if problem:
                raise GuardStop(
                    f"step {step}: {problem}; it is not saved, and {self._last_in_words()}"
                )

    def _memory_is_short(self, step: int) -> bool:
        """Whether a copy of all states of this node would not fit; then told once a save."""
        modules = [c.module for m in self.models.values() for c in m.chunks]
        needed = self.ranks_on_node * saved_bytes(modules)
        free = available_bytes()
        if not any_rank(needed > free, self.context):
            return False
        self.say(
            f"warning    step {step}: a copy of the state needs up to {needed / GIB:.3g} GiB of "
            f"host memory and {free / GIB:.3g} GiB are free: the checkpoint is written in line"
        )
        self.event("saving_in_line", step, needed_gb=needed / GIB, free_gb=free / GIB)
        return True

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Counts the time of a block as one for which training waited."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._blocked_s += time.perf_counter() - start


def saved_bytes(modules: Iterable[torch.nn.Module]) -> int:
    """Most that a copy of the modules' state takes; frozen weights are in no checkpoint."""
    return sum(
        p.numel() * (_BYTES_A_PARAMETER + p.element_size())
        for module in modules
        for p in module.parameters()
        if p.requires_grad
    )
