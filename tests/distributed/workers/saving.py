"""Saves that go wrong and right on two ranks; notes what each rank saw."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megappo.checkpoint import layout
from megappo.checkpoint.layout import KeepPolicy
from megappo.checkpoint.store import CheckpointStore
from megappo.config.sections import CheckpointSection
from megappo.distributed import parallel
from megappo.distributed.offload import optimizer_tensors
from megappo.distributed.rank_check import compare_ranks
from megappo.trainer.build import build_roles
from megappo.trainer.saver import Saver
from tests.distributed.workers.resume import minibatch, update
from tests.distributed.workers.start import start_worker
from tests.distributed.workers.update import share, whole_batch


class Scene:
    """A run's models and folder; `said` and `events` are what a user would see."""

    def __init__(self, context: parallel.ParallelContext, roles: dict[str, Any], out: Path) -> None:
        self.context, self.roles, self.out = context, roles, out
        self.said: list[str] = []
        self.events: list[tuple[str, int]] = []

    def saver(self, name: str, *, ranks_on_node: int = 1, **settings: Any) -> Saver:
        section = CheckpointSection(**settings)
        return Saver(
            store=CheckpointStore(
                folder=self.out / name,
                policy=KeepPolicy(
                    newest=section.keep, every=section.keep_every, best=section.keep_best
                ),
                context=self.context,
            ),
            settings=section,
            models={name: role.trainable for name, role in self.roles.items()},
            context=self.context,
            ranks_on_node=ranks_on_node,
            save_freq=1,
            state=lambda: {"note": 1},
            say=self.said.append,
            event=lambda kind, step, **_: self.events.append((kind, step)),
        )

    def take(self) -> dict[str, Any]:
        """What was said and noted since the last call."""
        found = {"said": list(self.said), "events": list(self.events)}
        self.said.clear()
        self.events.clear()
        return found


def main() -> None:
    worker = start_worker()
    config, context, specs = worker.config, worker.context, worker.specs

    def build() -> dict[str, Any]:
        actor, critic, _ = build_roles(config, specs, context, total_optimizer_steps=9)
        return {"actor": actor, "critic": critic}

    roles = build()
    mini = minibatch(roles, share(whole_batch(specs["actor"].vocab_size), context))
    scene = Scene(context, roles, worker.out)
    found = {"untrained": untrained(scene, build, mini)}
    for part in (policies, full_disk, short_memory, not_finite, drift):
        found[part.__name__] = part(scene)
    torch.save(found, worker.out / f"rank{context.rank}.pt")
    parallel.stop(context)


def untrained(scene: Scene, build: Callable[[], dict[str, Any]], mini: Any) -> dict[str, Any]:
    """Before the first step there are no moments yet: under critic warm-up, say."""
    saver = scene.saver("untrained")
    saver.save_now(0)
    went_on = update(scene.roles, mini)
    fresh = build()
    models = {name: role.trainable for name, role in fresh.items()}
    saver.store.load(scene.out / "untrained" / "step_000000", models, seed=1)
    return {"went_on": went_on, "resumed": update(fresh, mini), **scene.take()}


def policies(scene: Scene) -> dict[str, Any]:
    """Six steps, the second of which validates best."""
    saver = scene.saver("policies", keep=1, keep_every=3, keep_best=True)
    for step, score in enumerate((None, 0.5, 0.1, None, 0.5 - 1e-9, None), start=1):
        saver.after_step(step, val_score=score)
    under_way = saver.store.saving_step
    saver.save_now(6)
    folder = scene.out / "policies"
    found = {
        "under_way": under_way,
        "steps": layout.complete_steps(folder),
        "best": (folder / "best").read_text(),
        "latest": (folder / "latest").read_text(),
        "metrics": saver.take_metrics(),
        **scene.take(),
    }
    saver.rewind(2)  # a guard took the run back; its step is saved again, without a validation
    saver.save_anew(2)
    saver.save_now(3)
    found["scores_again"] = [
        layout.read_state(folder / f"step_00000{i}")["val_score"] for i in (2, 3)
    ]
    found["best_again"] = (folder / "best").read_text()
    if scene.context.is_main:  # as a kill in a save and one in a removal would leave it
        for name in ("step_000007.saving", "step_000001.removed"):
            (folder / name / "actor").mkdir(parents=True)
    saver.resumed(3)
    parallel.barrier(scene.context)
    found["after_resume"] = (saver.saved_step, sorted(path.name for path in folder.iterdir()))
    scene.take()
    return found


def full_disk(scene: Scene) -> dict[str, Any]:
    """Rank 1 cannot write files of that size; later it can."""
    saver = scene.saver("full_disk")
    saver.save_now(1)
    limited = scene.context.rank == 1
    with file_size_limit(20_000 if limited else resource.RLIM_INFINITY):
        saver.after_step(2, val_score=None)
        saver.finish()
        parallel.barrier(scene.context)  # rank 0 removes what was written while others go on
        failed = {
            **scene.take(),
            "left": sorted(p.name for p in (scene.out / "full_disk").iterdir()),
        }
        with raising() as at_the_end:
            saver.save_now(3)
        stopping = scene.saver("full_disk", on_failure="stop")
        with raising() as stopped:
            stopping.save_now(3)
    at_end = scene.take()
    saver.after_step(4, val_score=None)
    saver.finish()
    return {
        "failed": failed,
        "at_the_end": {"raised": at_the_end, **at_end},
        "stopped": stopped,
        "steps": layout.complete_steps(scene.out / "full_disk"),
        "failures": saver.take_metrics()["training/failed_saves"],
        **scene.take(),
    }


def short_memory(scene: Scene) -> dict[str, Any]:
    """So many ranks on the node that their copies do not fit."""
    saver = scene.saver("short_memory", ranks_on_node=10**9)
    saver.after_step(1, val_score=None)
    return {"steps": layout.complete_steps(scene.out / "short_memory"), **scene.take()}


def not_finite(scene: Scene) -> dict[str, Any]:
    """One weight on rank 1."""
    saver = scene.saver("not_finite", async_save=False)
    saver.save_now(1)
    with changed(scene, float("nan")), raising() as raised:
        saver.save_now(2)
    return {"raised": raised, "steps": layout.complete_steps(scene.out / "not_finite")}


def drift(scene: Scene) -> dict[str, Any]:
    """One weight on rank 1 that is off by the last bit."""
    actor = scene.roles["actor"].trainable
    compared = compare_ranks("actor", actor.chunks, scene.context)
    names = len(list(actor.chunks[0].module.named_parameters()))
    with changed(scene, None), raising() as raised:
        compare_ranks("actor", actor.chunks, scene.context)
    return {"compared": compared, "names": names, "raised": raised}


@contextmanager
def changed(scene: Scene, value: float | None) -> Iterator[None]:
    """The last element of a norm, on rank 1 alone; None: the next float32."""
    chunk = scene.roles["actor"].trainable.chunks[0].module
    weight = dict(chunk.named_parameters())["decoder.layers.0.input_layernorm.weight"]
    # On another DP rank than its own the norm is no part of what the optimizer holds.
    held = next(optimizer_tensors(scene.roles["actor"].trainable.optimizer)).detach()
    before = [tensor.detach().clone() for tensor in (weight, held)]
    with torch.no_grad():
        if scene.context.rank == 1 and value is None:
            weight[-1] = torch.nextafter(weight[-1], weight[-1] + 1)
        elif scene.context.rank == 1:
            weight[-1] = held.view(-1)[0] = value
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, was in zip((weight, held), before, strict=True):
                tensor.copy_(was)


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def raising() -> Iterator[list[str]]:
    """Catches what the block must raise; its type and text."""
    found: list[str] = []
    try:
        yield found
    except RuntimeError as error:
        found += [type(error).__name__, str(error)]
    assert found, "nothing was raised"


if __name__ == "__main__":
    main()
