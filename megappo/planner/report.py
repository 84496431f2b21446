"""A plan, and a search, as tables to read. Sizes in GB of 10^9 bytes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from megappo.planner.job import HEADS
from megappo.planner.parameters import model_elements
from megappo.planner.plan import GB, PhaseMemory, Plan, overrides
from megappo.planner.search import Found, summary

COLUMNS: dict[str, tuple[str, ...]] = {
    "weights": ("weights", "gathered weights", "fp8 copies", "buckets"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "working memory"),
    "logits": ("logits", "float32 log-probs"),
    "engine": ("engine",),
    "reserve": ("reserve", "fragmentation"),
}
"""Columns of the table of memory, and the parts that each adds up, over all roles."""


def plan_lines(found: Plan) -> Iterator[str]:
    """One layout."""
    job, fit = found.job, found.fit
    models = ", ".join(
        f"{role} {model_elements(spec, head=HEADS[role]) / 1e9:.2f}B {spec.model_type}"
        for role, spec in job.specs.items()
    )
    yield f"models     {models}"
    nodes = -(-job.world_size // job.gpus_per_node)
    yield f"devices    {job.world_size} x {found.gpu.name} on {nodes} node{'s' * (nodes > 1)}"
    yield f"layout     {job.layout.name}"
    verdict = "no" if fit.problems else "yes"
    yield (
        f"fits       {verdict}: {fit.peak / GB:.1f} of {found.gpu.memory_bytes / GB:.0f} GB in "
        f"{fit.fullest}"
    )
    for problem in fit.problems:
        yield f"           {problem}"
    if fit.engine.share:
        yield (
            f"engine     {fit.engine.weights / GB:.1f} GB weights, {fit.engine.cache / GB:.1f} GB "
            f"cache = {fit.engine.cache_tokens} tokens"
        )
    if found.host_bytes:
        yield f"host       {found.host_bytes / GB:.0f} GB of a node's memory for what is offloaded"
    yield ""
    yield from _memory_table(fit.phases)
    yield ""
    yield from _step_table(found)


def _memory_table(phases: dict[str, PhaseMemory]) -> Iterator[str]:
    yield _row("memory, GB", ["stage", "total", *COLUMNS])
    for phase, memory in phases.items():
        sizes = [
            sum(size for part, size in memory.parts.items() if _column(part) == column)
            for column in COLUMNS
        ]
        cells = [f"{size / GB:.1f}" for size in (memory.total, *sizes)]
        yield _row(phase, [str(memory.stage), *cells])


def _column(part: str) -> str:
    """The column of a part, whose name may begin with a role's."""
    for column, parts in COLUMNS.items():
        if part in parts or part.partition(" ")[2] in parts:
            return column
    raise AssertionError(part)


def _step_table(found: Plan) -> Iterator[str]:
    timed = found.times
    yield _row("time", ["seconds", "share"])
    for phase, seconds in timed.seconds.items():
        yield _row(phase, [f"{seconds:.2f}", f"{100 * seconds / timed.total:.0f} %"])
    yield _row("step", [f"{timed.total:.2f}", ""])
    yield ""
    yield _row("traffic", ["GB a rank"])
    for group, size in found.traffic.items():
        yield _row(group, [f"{size / GB:.2f}"])
    yield ""
    shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in timed.mfu.items())
    yield f"MFU        {shares}"
    yield f"bubble     {100 * timed.bubble:.1f} % of the actor's ideal update time"
    yield f"speed      {found.tokens_per_s:.0f} tokens a second and device"


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<14}" + "".join(f"{cell:>12}" for cell in cells)


def search_lines(found: Found, *, top: int) -> Iterator[str]:
    """The best layouts, and why the others are none."""
    yield f"{found.num_tried} layouts: {len(found.plans)} fit, {len(found.refused)} are refused"
    if found.plans:
        yield ""
        yield _row("", ["step, s", "tokens/s/dev", "actor MFU", "bubble", "peak, GB"]) + "  layout"
    for number, one in enumerate(found.plans[:top], start=1):
        cells = [
            f"{one.times.total:.1f}",
            f"{one.tokens_per_s:.0f}",
            f"{100 * one.times.mfu['actor']:.1f} %",
            f"{100 * one.times.bubble:.1f} %",
            f"{one.fit.peak / GB:.1f}",
        ]
        yield _row(f"{number}.", cells) + f"  {one.job.layout.name}"
        yield f"   {shlex.join(overrides(one.job, found.given))}"
    if found.refused:
        yield ""
        yield "refused:"
    for count, example in summary(found.refused):
        yield f"{count:>6}  {example.layout}: {example.reason}"
