"""What the models of a run keep in device memory, and what of it leaves between phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megappo.distributed.grad_sync import Trainable
from megappo.distributed.offload import PARTS, Offloader
from megappo.trainer.resources import GIB


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Counters at the start of a step, to take differences from."""

    offloaded_bytes: int
    """device bytes that are free while the engine generates"""
    moved_bytes: int
    wait_s: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """All models of a run on this rank. Nothing here communicates."""

    trained: Sequence[Trainable]
    reference: Offloader | None

    def offload(self) -> Marks:
        """Moves to the host what the config says, before generation; may be repeated."""
        for memory in self._all():
            memory.offload()
        return Marks(
            offloaded_bytes=sum(memory.offloaded_bytes for memory in self._all()),
            moved_bytes=self._moved(),
            wait_s={model.name: model.grad_sync.wait_s for model in self.trained},
        )

    def report(self, start: Marks) -> dict[str, float]:
        """Metrics of a step that began with `start`: GiB, and seconds at the end of backward."""
        found = {
            "perf/offloaded_gb": start.offloaded_bytes / GIB,
            "perf/offload_moved_gb": (self._moved() - start.moved_bytes) / GIB,
        }
        for model in self.trained:
            waited = model.grad_sync.wait_s - start.wait_s[model.name]
            found[f"perf/grad_sync_wait_s/{model.name}"] = waited
            if model.memory is not None:
                for part in PARTS:
                    size = model.memory.part_bytes(part) / GIB
                    found[f"perf/{part}_gb/{model.name}"] = size
        return found

    def _all(self) -> list[Offloader]:
        memories = [*(model.memory for model in self.trained), self.reference]
        return [memory for memory in memories if memory is not None]

    def _moved(self) -> int:
        return sum(memory.moved_bytes for memory in self._all())
