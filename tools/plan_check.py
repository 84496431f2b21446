"""Measures what `megappo plan` predicts: memory of weights, gradients, optimizer and activations.

    python tools/plan_check.py                            # prints the table
    python tools/plan_check.py --write docs/planner.md    # and puts it into the document
    python tools/plan_check.py --only tp2_sp moe_ep2

The models and layouts are those of tools/parallel_table.py, on real gloo ranks. Every sample has
the longest prompt and response that the config allows, as the planner assumes. Actor and critic
take one optimizer step; what is counted are the storages of real tensors, each once: parameter
buffers, gradient buffers, optimizer state, and, moment by moment through the whole update, what
autograd holds for backward passes (`torch.autograd.graph.saved_tensors_hooks`, a storage from its
first saved tensor to the release of its last). Parameters are no activations.

Exit code 1 if a prediction is off by more than `BOUND`. Ranks of one pipeline stage hold equally
much, but for experts' activations: which rank gets more tokens is the routers' choice, so the mean
of a stage's ranks is compared.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tools import parallel_table as table  # noqa: E402

BOUND = 0.10
"""Largest relative difference between prediction and measurement."""
PARTS = ("weights", "grads", "optimizer", "activations")
ROLES = ("actor", "critic")
PROMPT, RESPONSE = 24, 32
"""Tokens, as parallel_table.CONFIG has them for the longest."""
LAYOUTS = (
    "one rank: dense", "micro1", "padded", "recompute", "tp2", "tp2_sp", "tp2_sp_recompute", "pp2",
    "pp2_uneven", "pp2_vp2", "cp2", "dp2", "dp2_bf16", "pp2_bf16", "tp2_dp2", "tp2_sp_pp2", "pp4",
    "cp2_dp2", "one rank: moe", "moe_ep2", "moe_ep2_bf16", "moe_tp2_sp", "moe_tp2_sp_ep2",
    "moe_pp2", "moe_ep2_dp2",
)  # fmt: skip
EXTRA = {
    "dp2_bf16": table.Layout(title="DP2, bfloat16", ranks=2, overrides=("model.dtype=bfloat16",)),
    "pp2_bf16": table.Layout(
        title="PP2, bfloat16", ranks=2, overrides=(table.PP2, "model.dtype=bfloat16")
    ),
    "moe_ep2_bf16": table.Layout(
        title="EP2, bfloat16", ranks=2, models="moe",
        overrides=(table.EP2, "model.dtype=bfloat16"),
    ),
}  # fmt: skip
"""Layouts that the parallel table, whose comparisons take float32, does not have."""
START, END = "<!-- table: tools/plan_check.py -->", "<!-- end of plan table -->"


class LiveBytes:
    """Bytes that autograd holds, now and at the most; parameters do not count."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._holders: dict[int, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Counts what is saved inside the block, until it is released."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor):
            yield

    def _pack(self, tensor: torch.Tensor) -> _Held:
        held = _Held(tensor)
        storage = tensor.untyped_storage()
        is_parameter = isinstance(tensor, torch.nn.Parameter) or isinstance(
            tensor._base, torch.nn.Parameter
        )
        if not is_parameter and storage.nbytes():
            address, size = storage.data_ptr(), storage.nbytes()
            if not self._holders.get(address):
                self.now += size
                self.peak = max(self.peak, self.now)
            self._holders[address] = self._holders.get(address, 0) + 1
            weakref.finalize(held, self._release, address, size)
        return held

    def _release(self, address: int, size: int) -> None:
        self._holders[address] -= 1
        if not self._holders[address]:
            self.now -= size


class _Held:
    """What autograd keeps in place of a tensor; its end is the tensor's release."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def all_layouts() -> dict[str, Any]:
    """The parallel table's layouts, the one-rank runs among them, and ours."""
    return {**table.all_layouts(), **EXTRA}


# What follows runs on every rank.


def work(root: Path, names: Sequence[str], ports: Sequence[int]) -> None:
    """Measures layouts one after another and writes `<name>.<rank>.pt` for each."""
    from megappo.distributed.pipeline import SavedBytes

    # Its own hooks would hide the first forward pass from ours.
    SavedBytes.counting = lambda self: nullcontext()
    for name, port in zip(names, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        layout = all_layouts()[name]
        kind = layout.models.partition(",")[0]
        overrides = [*table.MODELS[layout.models], *layout.overrides]
        found = measure(root / f"{kind}.yaml", overrides)
        torch.save(found, root / f"{name}.{os.environ['RANK']}.pt")


def measure(config_path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """One step of actor and critic, and what the planner says of this rank's stage."""
    from megappo.config import load
    from megappo.distributed import parallel
    from megappo.distributed.metrics import Tally
    from megappo.models.spec import load_spec
    from megappo.trainer.build import build_roles, make_planner
    from megappo.trainer.micro_batches import as_mini_batches
    from megappo.trainer.preflight import model_paths

    config = load(config_path, overrides)
    launch = parallel.LaunchEnvironment.read()
    context = parallel.start(
        launch, parallel.Degrees.of(config.parallel), device="cpu", seed=1, timeout_s=120
    )
    specs = {role: load_spec(path) for role, path in model_paths(config).items()}
    actor, critic, reference = build_roles(config, specs, context, total_optimizer_steps=2)
    batch = full_batch(context)
    size = len(batch)
    found: dict[str, Any] = {"stage": context.pp_rank, "measured": {}, "predicted": {}}
    for role, network, settings in (
        (actor, actor.policy.network, config.actor),
        (critic, critic.network, config.critic),
    ):
        name = role.trainable.name
        plan = make_planner(settings, network, size).plan(batch.total_lengths)
        (mini,) = as_mini_batches(batch, plan, size)
        live = LiveBytes()
        with live.watching():
            if name == "actor":
                actor.update(mini, Tally(), is_first=True)
            else:
                critic.update(mini, Tally())
        memory = role.trainable.memory
        found["measured"][name] = {
            "weights": memory.part_bytes("params"),
            "grads": memory.part_bytes("grads"),
            "optimizer": memory.part_bytes("optimizer"),
            "activations": live.peak,
        }
        found["predicted"][name] = predict(config, specs, name, context)
    assert reference is not None
    found["measured"]["reference"] = {"weights": reference.memory.part_bytes("params")}
    found["predicted"]["reference"] = predict(config, specs, "reference", context)
    parallel.stop(context)
    return found


def full_batch(context: Any) -> Any:
    """This DP rank's samples of one mini-batch, each as long as can be."""
    from megappo.types import Completion, Prompt, collate

    per_rank = table.MINI_BATCH * table.SAMPLES_A_PROMPT // context.dp
    generator = torch.Generator().manual_seed(7 + context.dp_rank)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, table.VOCAB, (length,), generator=generator).tolist())

    prompts = [
        Prompt(row=i, token_ids=ids(PROMPT), data_source="", ground_truth="", extra_info={})
        for i in range(per_rank)
    ]
    completions = [
        Completion(
            token_ids=ids(RESPONSE), log_probs=(-1.0,) * RESPONSE, finish_reason="stop", text=""
        )
        for _ in range(per_rank)
    ]
    batch = collate(prompts, completions)
    waves = torch.sin(torch.arange(batch.responses.numel())).view(batch.responses.shape)
    return batch.with_fields(
        old_log_probs=waves - 2, ref_log_probs=waves - 2, values=waves, advantages=waves,
        returns=waves,
    )  # fmt: skip


def predict(config: Any, specs: Any, role: str, context: Any) -> dict[str, float]:
    """The planner's bytes of a role on this rank."""
    from megappo.planner.job import Job

    job = Job.of(config, specs, world_size=context.world_size, device="cpu")
    static = job.static(role, context.pp_rank)
    if role == "reference":
        return {"weights": static.weights}
    return {
        "weights": static.weights,
        "grads": static.grads,
        "optimizer": static.optimizer,
        "activations": job.activations(role, context.pp_rank),
    }


# What follows runs in the process that starts the ranks.


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout: measured bytes of the fullest stage, and the worst relative difference."""

    name: str
    role: str
    measured: dict[str, float]
    errors: dict[str, float]

    @property
    def worst(self) -> float:
        """Largest relative difference, by absolute value."""
        return max(abs(error) for error in self.errors.values())


def run(names: Sequence[str], root: Path, *, timeout_s: float = 600.0) -> list[Row]:
    """Measures layouts and compares each with its prediction."""
    layouts = all_layouts()
    table.make_inputs(root)
    for ranks in sorted({layouts[name].ranks for name in names}):
        mine = [name for name in names if layouts[name].ranks == ranks]
        arguments = ["--rank-of", str(root), "--only", *mine]
        table.run_ranks(Path(__file__), arguments, ranks, len(mine), root, timeout_s)
    rows = []
    for name in names:
        found = [
            torch.load(root / f"{name}.{rank}.pt", weights_only=True)
            for rank in range(layouts[name].ranks)
        ]
        rows += [compare(name, role, found) for role in (*ROLES, "reference")]
    return rows


def compare(name: str, role: str, found: Sequence[dict[str, Any]]) -> Row:
    """Every rank's weights, gradients and state; activations as the mean of a stage's ranks."""
    measured: dict[str, float] = {}
    errors: dict[str, float] = {}
    stages = sorted({rank["stage"] for rank in found})
    for part in found[0]["predicted"][role]:
        pairs = []
        for stage in stages:
            here = [rank for rank in found if rank["stage"] == stage]
            values = [rank["measured"][role][part] for rank in here]
            if part == "activations":
                values = [sum(values) / len(values)]
            pairs += [(value, here[0]["predicted"][role][part]) for value in values]
        measured[part] = max(value for value, _ in pairs)
        errors[part] = max((p / m - 1 for m, p in pairs), key=abs)
    return Row(name=name, role=role, measured=measured, errors=errors)


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """The table's lines."""
    yield (
        "| models | layout | ranks | role | weights | gradients | optimizer | activations | "
        "prediction is off by |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        if row.role == "reference":
            continue
        layout = all_layouts()[row.name]
        sizes = " | ".join(f"{row.measured[part] / 1024:.1f}" for part in PARTS)
        errors = ", ".join(f"{100 * row.errors[part]:+.1f}" for part in PARTS)
        yield (
            f"| {layout.models} | {layout.title} | {layout.ranks} | {row.role} | {sizes} | "
            f"{errors} % |"
        )


def main() -> int:
    """Runs the table, or, as one of its ranks, a rank's part of it."""
    parser = argparse.ArgumentParser(description="measures the memory that megappo plan predicts")
    parser.add_argument("--only", nargs="*", default=list(LAYOUTS), help="names of layouts")
    parser.add_argument("--write", type=Path, help="document whose table is replaced")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ports", nargs="*", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        work(arguments.rank_of, arguments.only, arguments.ports)
        return 0
    unknown = sorted(set(arguments.only) - set(all_layouts()))
    if unknown:
        parser.error(f"unknown layouts {', '.join(unknown)}; known: {', '.join(LAYOUTS)}")
    with tempfile.TemporaryDirectory() as folder:
        rows = run(arguments.only, Path(folder))
    lines = list(markdown(rows))
    print("\n".join(lines))
    if arguments.write:
        table.write_table(arguments.write, lines, start=START, end=END)
    return 0 if all(row.worst <= BOUND for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
