"""Megatron's real FSDP on gloo ranks: updates, weight export, checkpoints, each against DDP.

The program refuses FSDP on a CPU; here the refusal is told that the device is CUDA, and the one
constant more is retargeted that Megatron's FSDP needs for it. Streams, which keep a buffer from
being used again while it is gathered, do nothing on a CPU: what overlaps on a GPU runs in order
here, gathers too, which gloo would do in threads of its own.
"""

from __future__ import annotations

import argparse
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megappo.checkpoint.layout import KeepPolicy
from megappo.checkpoint.store import CheckpointStore
from megappo.config import Config, load
from megappo.distributed import cpu_backend, fsdp, parallel
from megappo.distributed.metrics import Tally
from megappo.distributed.offload import PARTS, OffloadedError
from megappo.errors import CheckpointError
from megappo.models.hf_export import export_hf, save_hf
from megappo.models.spec import load_spec
from megappo.roles.actor import Actor
from megappo.roles.critic import Critic
from megappo.trainer import build
from megappo.types import MiniBatch, RolloutBatch
from tests.distributed.workers.saving import file_size_limit, raising
from tests.distributed.workers.update import made_up, share, whole_batch

Weights = dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dtypes", nargs="+")
    parser.add_argument("--overrides", nargs="*", default=[])
    arguments = parser.parse_args()
    pretend_cuda()
    launch = parallel.LaunchEnvironment.read()
    degrees = parallel.Degrees.of(load(arguments.config, arguments.overrides).parallel)
    context = parallel.start(launch, degrees, device="cpu", seed=1, timeout_s=300)
    gather_in_order()
    for dtype in arguments.dtypes:
        found = {}
        for kind in ("ddp", "fsdp"):
            overrides = [
                *arguments.overrides,
                f"model.dtype={dtype}",
                f"parallel.fsdp={str(kind == 'fsdp').lower()}",
                "parallel.overlap_param_gather=true",
                "parallel.overlap_grad_reduce=true",
            ]
            config = load(arguments.config, overrides)
            store = CheckpointStore(
                folder=arguments.out / dtype / kind, policy=KeepPolicy(newest=9), context=context
            )
            found[kind] = Run(config, context, store).run(arguments.out / dtype / f"{kind}_hf")
        if not arguments.overrides:
            found["errors"] = refusals(arguments.config, arguments.out / dtype, context)
        torch.save(found, arguments.out / f"{dtype}.{context.rank}.pt")
    parallel.stop(context)


def pretend_cuda() -> None:
    """Lets FSDP be built on the CPU: mcore_fsdp_adapter.py:91 writes a device as f"cuda:{...}"."""
    check, retarget = fsdp.check, cpu_backend._retarget_constant
    fsdp.check = lambda device, **rest: check("cuda", **rest)
    cpu_backend._retarget_constant = lambda c: (
        "" if isinstance(c, str) and c == "cuda:" else retarget(c)
    )


def gather_in_order() -> None:
    """A gather that FSDP starts has ended before anything else begins."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

    coalescing = param_and_grad_buffer._coalescing_manager

    @contextmanager
    def in_order(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with coalescing(*args, **kwargs) as works:
            yield works
        works.wait()

    param_and_grad_buffer._coalescing_manager = in_order


class Run:
    """Actor and critic of one kind and dtype, and samples for them."""

    def __init__(
        self, config: Config, context: parallel.ParallelContext, store: CheckpointStore
    ) -> None:
        self.config, self.context, self.store = config, context, store
        self.spec = load_spec(config.model.path)
        self.actor, self.critic = self.build()
        self.bare = dict(export_hf(self.build_bare(), self.spec))
        self.batch = self.score()

    def build(self) -> tuple[Actor, Critic]:
        specs = dict.fromkeys(("actor", "critic", "reference"), self.spec)
        actor, critic, _ = build.build_roles(
            self.config, specs, self.context, total_optimizer_steps=8
        )
        return actor, critic

    def build_bare(self) -> list[torch.nn.Module]:
        network = build.build_network(
            self.config, self.spec, self.config.model.path, "lm", self.context
        )
        return list(network.chunks)

    def score(self) -> RolloutBatch:
        batch = share(whole_batch(self.spec.vocab_size), self.context)
        self.micro = [list(range(i, i + 2)) for i in range(0, len(batch), 2)]
        old, _ = self.actor.log_probs(batch, self.micro)
        values, _ = self.critic.values(batch, self.micro)
        noise = torch.randn(old.shape, generator=torch.Generator().manual_seed(2))
        return batch.with_fields(
            old_log_probs=old,
            values=made_up(values, batch),
            ref_log_probs=old - 0.1,
            advantages=noise,
            returns=noise + 0.5,
        )

    def update(self, actor: Actor, critic: Critic, number: int) -> list[float]:
        """One optimizer step of each model on half of the samples; their gradient norms."""
        size = len(self.batch) // 2
        part = self.batch.select(range((number % 2) * size, (number % 2 + 1) * size))
        mini = MiniBatch(samples=part, micro_batches=tuple((i, i + 1) for i in range(0, size, 2)))
        return [
            critic.update(mini, Tally()),
            actor.update(mini, Tally(), is_first=number == 0),
        ]

    def run(self, hf: Path) -> dict[str, Any]:
        actor, critic = self.actor, self.critic
        found: dict[str, Any] = {"bare": self.bare, "untrained": self.weights(actor, critic)}
        norms = [self.update(actor, critic, n) for n in (0, 1)]
        saved = self.store.save(2, models(actor, critic), {}).path
        found["saved"] = self.weights(actor, critic)
        found["saved_lr"] = actor.trainable.lr
        norms.append(self.update(actor, critic, 2))
        found["norms"], found["after"] = norms, self.weights(actor, critic)
        found["new"], _ = actor.log_probs(self.batch, self.micro)
        save_hf(actor.trainable.chunks, self.spec, self.config.model.path, hf)
        found["held"] = sum(len(p.main.to_local().flatten()) for p in sharded(actor))
        for name, (one, other) in {
            "fresh": self.build(),
            "rolled_back": (actor, critic),  # a gather of its first layer is under way
        }.items():
            self.store.load(saved, models(one, other), seed=1)
            found[f"{name}_loaded"] = self.weights(one, other)
            found[f"{name}_lr"] = one.trainable.lr
            found[f"{name}_norms"] = self.update(one, other, 2)
            found[f"{name}_after"] = self.weights(one, other)
        if not self.config.parallel.fsdp:
            found |= self.late_gather()
        return found

    def late_gather(self) -> dict[str, Weights]:
        """A checkpoint right after a step that leaves the gather to the next forward pass."""
        trainable = self.actor.trainable
        (chunk,) = trainable.chunks
        trainable.zero_grad()
        for parameter in chunk.module.parameters():
            parameter.main_grad.fill_(0.5)
        chunk.start_grad_sync()
        chunk.finish_grad_sync()
        trainable.step(settle=False)
        saved = self.store.save(3, models(self.actor, self.critic), {}).path
        trainable.settle()
        found = {"late": self.weights(self.actor, self.critic)}
        actor, critic = self.build()
        self.store.load(saved, models(actor, critic), seed=1)
        return found | {"late_loaded": self.weights(actor, critic)}

    def weights(self, actor: Actor, critic: Critic) -> Weights:
        exported = export_hf(actor.trainable.chunks, self.spec)
        found = {name: tensor.clone() for name, tensor in exported}
        exported = export_hf(critic.trainable.chunks, self.spec, head="value")
        return found | {f"critic.{name}": tensor.clone() for name, tensor in exported}


def models(actor: Actor, critic: Critic) -> dict[str, Any]:
    return {"actor": actor.trainable, "critic": critic.trainable}


def sharded(actor: Actor | Critic) -> Iterator[fsdp.ShardedParameter]:
    for chunk in actor.trainable.chunks:
        if fsdp.is_sharded(chunk):
            yield from fsdp.sharded_parameters(chunk)


def refusals(path: Path, out: Path, context: parallel.ParallelContext) -> dict[str, str]:
    """The message of everything that must be refused."""
    messages: dict[str, str] = {}

    @contextmanager
    def noting(name: str, kind: type[Exception]) -> Iterator[None]:
        try:
            yield
        except kind as error:
            messages[name] = str(error)

    def store(kind: str) -> CheckpointStore:
        return CheckpointStore(folder=out / kind, policy=KeepPolicy(newest=9), context=context)

    ddp = Run(load(path, [f"actor.memory.{p}_offload=true" for p in ("param", "grad")]), context,
              store("other"))  # fmt: skip
    sharded_run = Run(load(path, ["parallel.fsdp=true"]), context, store("other"))
    for run, other in ((ddp, "fsdp"), (sharded_run, "ddp")):
        with noting(f"reads_{other}", CheckpointError):
            run.store.load(out / other / "step_000002", models(run.actor, run.critic), seed=1)
    swapped = {"actor": sharded_run.critic.trainable, "critic": sharded_run.actor.trainable}
    with noting("another_model", CheckpointError):
        sharded_run.store.load(out / "fsdp" / "step_000002", swapped, seed=1)
    network = sharded_run.actor.policy.network
    sharded_run.update(sharded_run.actor, sharded_run.critic, 0)
    messages |= failing_saves(sharded_run)
    with noting("bare_chunk", AssertionError):
        dict(export_hf(network.chunks, network.spec))
    memory = ddp.actor.trainable.memory
    assert memory is not None
    memory.offload()
    assert memory.parts == PARTS[:2]
    with noting("export_away", OffloadedError):
        dict(export_hf(ddp.actor.trainable.chunks, ddp.spec))
    # Loading brings them onto the device for as long as it takes.
    ddp.store.load(out / "ddp" / "step_000002", models(ddp.actor, ddp.critic), seed=1)
    messages["away_after_load"] = str([part for part in PARTS if memory.is_away(part)])
    return messages


def failing_saves(run: Run) -> dict[str, str]:
    """What users see of a rank that cannot write and of a full disk, and what is left of them."""
    store, both = run.store, models(run.actor, run.critic)
    saved = store.save(1, both, {})
    held = [p.main.to_local().numel() for role in (run.actor, run.critic) for p in sharded(role)]
    found = {
        "saved_bytes": str(saved.num_bytes),
        "elements": str(sum(parallel.all_gather_objects(sum(held), run.context.world_group))),
    }
    unlimited = resource.RLIM_INFINITY
    with file_size_limit(20_000 if run.context.rank == 1 else unlimited), raising() as failed:
        store.save(2, both, {})
    usage = shutil.disk_usage
    shutil.disk_usage = lambda folder: usage(folder)._replace(free=2**19)
    with raising() as full:
        store.save(3, both, {})
    shutil.disk_usage = usage
    parallel.barrier(run.context)
    found |= {"failed_save": " ".join(failed), "full_disk": " ".join(full)}
    return found | {"left": " ".join(sorted(path.name for path in store.folder.iterdir()))}


if __name__ == "__main__":
    main()
