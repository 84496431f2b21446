"""PPO updates of actor and critic under the memory switches, on the fixed samples of `update.py`.

A case is a mode and a dtype; all of a start run in one process and layout. Modes: `plain`;
`offload`, which moves everything to the host between every two phases and measures it; `overlap`,
with both overlap flags and buckets so small that there are many; `broken`, an update with a
gradient that is not a number.
"""

from __future__ import annotations

import argparse
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.config import Config, load
from megappo.distributed import parallel
from megappo.distributed.grad_sync import NonFiniteGradientError, Trainable, make_trainable
from megappo.distributed.metrics import Tally
from megappo.distributed.offload import PARTS, OffloadedError, Offloader
from megappo.errors import UserError
from megappo.models.spec import load_spec
from megappo.roles.actor import Actor
from megappo.roles.critic import Critic
from megappo.trainer import build
from megappo.types import MiniBatch, RolloutBatch
from tests.distributed.workers.update import (
    count_collectives,
    export,
    made_up,
    share,
    whole_batch,
)

BUCKET_ELEMENTS = 3000
SWITCHES = {
    "plain": [],
    "broken": [],
    "overlap": ["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"],
    "offload": [
        f"{role}.memory.{part}_offload=true"
        for role in ("actor", "critic")
        for part in ("param", "grad", "optimizer")
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", nargs="+", help="mode:dtype")
    parser.add_argument("--overrides", nargs="*", default=[])
    arguments = parser.parse_args()
    layout = load(arguments.config, arguments.overrides).parallel
    launch = parallel.LaunchEnvironment.read()
    degrees = parallel.Degrees.of(layout)
    context = parallel.start(launch, degrees, device="cpu", seed=1, timeout_s=300)
    for case in arguments.cases:
        mode, dtype = case.split(":")
        overrides = [*arguments.overrides, *SWITCHES[mode], f"model.dtype={dtype}"]
        result = run_case(mode, load(arguments.config, overrides), context)
        torch.save(result, arguments.out / f"{case}.{context.rank}.pt")
    parallel.stop(context)


def run_case(mode: str, config: Config, context: parallel.ParallelContext) -> dict[str, Any]:
    """Builds the models anew and trains them."""
    spec = load_spec(config.model.path)
    with many_buckets(config):
        actor, critic, reference = build.build_roles(
            config, dict.fromkeys(("actor", "critic", "reference"), spec), context,
            total_optimizer_steps=4,
        )  # fmt: skip
    assert reference is not None
    batch = share(whole_batch(spec.vocab_size), context)
    if mode == "broken":
        return break_update(actor, context)
    frozen = Offloader("reference", reference.chunks)
    memories = {"actor": memory(actor), "critic": memory(critic), "reference": frozen}
    phase = Phases(memories) if mode == "offload" else (lambda **needed: nullcontext())
    result = train(actor, critic, reference, batch, phase)
    result["part_bytes"] = {
        name: {part: one.part_bytes(part) for part in PARTS} for name, one in memories.items()
    }
    result["moved_bytes"] = {name: one.moved_bytes for name, one in memories.items()}
    if mode == "overlap":
        result["late"] = late_gather(actor)
    if isinstance(phase, Phases):
        result["device_bytes"] = phase.device_bytes
        result["offloaded_bytes"] = sum(one.offloaded_bytes for one in memories.values())
        if context.pp == 1:  # where a stage that refuses leaves nobody waiting for it
            result["errors"] = use_while_away(actor, reference, frozen, batch)
        for one in memories.values():
            one.load()
        result["loaded_bytes"] = phase.held_bytes()
    return result


def memory(role: Actor | Critic) -> Offloader:
    found = role.trainable.memory
    assert found is not None
    return found


@contextmanager
def many_buckets(config: Config) -> Iterator[None]:
    """Many gradient buckets where one would be real, for overlap to have something to do."""
    from megatron.core import distributed

    real = distributed.DistributedDataParallelConfig
    if config.parallel.overlap_grad_reduce:
        distributed.DistributedDataParallelConfig = functools.partial(
            real, bucket_size=BUCKET_ELEMENTS
        )
    yield
    distributed.DistributedDataParallelConfig = real


class Phases:
    """Everything is on the host but what a phase asks for; measures storages in between."""

    def __init__(self, memories: dict[str, Offloader]) -> None:
        self.memories = memories
        self.device_bytes: list[int] = []
        # Objects of the test's own, from before anything moved.
        self.tensors: list[torch.Tensor] = []
        for one in memories.values():
            one.offload()

    def __call__(self, **needed: tuple[Any, ...]) -> AbstractContextManager[None]:
        ((name, parts),) = needed.items()
        self.device_bytes.append(self.held_bytes())
        return self.memories[name].on_device(*parts)

    def held_bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.tensors)


def train(
    actor: Actor,
    critic: Critic,
    reference: Any,
    batch: RolloutBatch,
    phase: Callable[..., AbstractContextManager[None]],
) -> dict[str, Any]:
    """Two optimizer steps of each model; weights are exported after every one."""
    micro = [list(range(i, i + 2)) for i in range(0, len(batch), 2)]
    if isinstance(phase, Phases):
        phase.tensors = held_tensors(actor, critic, reference)
    with phase(actor=("params",)):
        old, _ = actor.log_probs(batch, micro)
    with phase(critic=("params",)):
        values, _ = critic.values(batch, micro)
    with phase(reference=()):
        ref, _ = reference.log_probs(batch, micro)
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(old.shape, generator=generator)
    batch = batch.with_fields(
        old_log_probs=old,
        values=made_up(values, batch),
        ref_log_probs=ref - 0.1,
        advantages=noise,
        returns=noise + 0.5,
    )
    counts: Counter[str] = count_collectives()
    size = len(batch) // 2
    norms, exports = [], []
    for start in (0, size):
        part = batch.select(range(start, start + size))
        # Another number of forward passes each time, as budgets of tokens give.
        width = 2 if start == 0 else 1
        passes = tuple(tuple(range(i, i + width)) for i in range(0, size, width))
        mini = MiniBatch(samples=part, micro_batches=passes)
        with phase(critic=()):
            norms.append(critic.update(mini, Tally()))
        with phase(actor=()):
            norms.append(actor.update(mini, Tally(), is_first=start == 0))
        with phase(actor=("params",)):
            exports.append(export(actor.policy.network, "lm"))
        if isinstance(phase, Phases):
            phase.tensors = held_tensors(actor, critic, reference)
    with phase(critic=("params",)):
        critic_weights = export(critic.network, "value")
    with phase(actor=("params",)):
        new, _ = actor.log_probs(batch, micro)
    return {
        "norms": norms,
        "exports": exports,
        "critic": critic_weights,
        "new": new,
        "collectives": dict(counts),
        "buckets": len(actor.trainable.chunks[0].bucket_groups),
        "optimizers": len(actor.trainable.optimizer.chained_optimizers),
        "wait_s": actor.trainable.grad_sync.wait_s,
    }


def held_tensors(actor: Actor, critic: Critic, reference: Any) -> list[torch.Tensor]:
    """One tensor of each large storage, found without the offloader's own bookkeeping."""
    found: dict[int, torch.Tensor] = {}
    trainables = (actor.trainable, critic.trainable)
    tensors: list[torch.Tensor] = [p for c in reference.chunks for p in c.parameters()]
    for trainable in trainables:
        wrapped = trainable.chunks[0]
        for buffer in [*wrapped.buffers, *wrapped.expert_parallel_buffers]:
            tensors += [buffer.param_data, buffer.grad_data]
        for chained in trainable.optimizer.chained_optimizers:
            for group in chained.optimizer.param_groups:
                tensors += group["params"]
            for state in chained.optimizer.state.values():
                tensors += [state["exp_avg"], state["exp_avg_sq"]]
    for tensor in tensors:
        found[tensor.untyped_storage()._cdata] = tensor
    return list(found.values())


def late_gather(actor: Actor) -> dict[str, Any]:
    """A step that leaves the gather to the next forward pass: what `settle` then mends."""
    trainable: Trainable = actor.trainable
    chunk = trainable.chunks[0]
    weights = dict(chunk.module.named_parameters())
    before = {n: p.detach().clone() for n, p in weights.items()}
    trainable.zero_grad()
    for p in weights.values():
        p.main_grad.fill_(0.5)
    chunk.start_grad_sync()
    chunk.finish_grad_sync()
    trainable.step(settle=False)
    unsettled = {n: p.detach().clone() for n, p in weights.items()}
    trainable.settle()
    settled = {n: p.detach().clone() for n, p in weights.items()}
    trainable.settle()
    return {"before": before, "unsettled": unsettled, "settled": settled}


def use_while_away(
    actor: Actor, reference: Any, frozen: Offloader, batch: RolloutBatch
) -> dict[str, str]:
    """The message of every use that must be refused."""
    uses: dict[str, Callable[[], Any]] = {
        "reference": lambda: forward(reference, batch),
        "actor": lambda: forward(actor.policy, batch),
        "zero_grad": actor.trainable.zero_grad,
        "step": actor.trainable.step,
    }
    messages = {}
    for name, use in uses.items():
        with pytest.raises(OffloadedError) as caught:
            use()
        messages[name] = str(caught.value)
    assert frozen.is_away("params")
    return messages


def forward(policy: Any, batch: RolloutBatch) -> None:
    """A forward pass that nobody brought the weights back for."""
    policy.network.fill(
        policy.chunks, batch, [[0, 1]], lambda logits, micro: [logits], num_outputs=1
    )


def break_update(actor: Actor, context: parallel.ParallelContext) -> dict[str, Any]:
    """A gradient on the last rank alone turns to NaN."""
    chunk = actor.trainable.chunks[0]
    named = dict(chunk.module.named_parameters())
    with pytest.raises(UserError) as refused:
        make_trainable(
            "actor", [chunk.module], actor.policy.network.config, optim=actor.settings.optim,
            total_optimizer_steps=1, fsdp=True,
        )  # fmt: skip
    weights = {n: p.detach().clone() for n, p in named.items()}
    actor.trainable.zero_grad()
    if context.rank == context.world_size - 1:
        named["decoder.layers.2.mlp.linear_fc1.weight"].main_grad[3, 3] = torch.nan
    chunk.start_grad_sync()
    with pytest.raises(NonFiniteGradientError) as caught:
        actor.trainable.step()
    same = all(torch.equal(p, weights[n]) for n, p in named.items())
    return {"message": str(caught.value), "same": same, "refused": str(refused.value)}


if __name__ == "__main__":
    main()
