"""Megatron's forward-backward schedules behind two calls: forward only, and forward with backward.

The schedule (none, 1F1B, interleaved 1F1B) is chosen by the pipeline size and the number of chunks
on a rank. Losses go in as masked SUMS with their counts: Megatron's three-value form, in which
gradients are divided once, by the count over all micro-batches and all DP and CP ranks. Its
two-value form averages means of micro-batches, which depends on how a mini-batch is split, and is
never used. Megatron divides losses in place, so what is logged is taken
out before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from megappo.distributed.metrics import Tally

Input = TypeVar("Input")
Output = TypeVar("Output")

ModelCall = Callable[[torch.nn.Module, Input], Tensor]
"""Runs one chunk on one micro-batch: hidden states between stages, the head's output last."""


@dataclass(frozen=True, kw_only=True)
class LossSum:
    """One micro-batch's loss on this rank."""

    total: Tensor
    """0-dim, attached to the graph: a sum, not a mean."""
    denominator: Tensor
    """0-dim int: this micro-batch's part of what the sum over all of them is divided by."""
    tally: Tally


class SavedBytes:
    """Counts what autograd keeps of a forward pass for the backward pass: the activations.

    Parameters are not counted, and a storage that several tensors share counts once. What is
    recomputed is not kept, so recomputation shows here.
    """

    def __init__(self) -> None:
        self.total = 0
        self._seen: set[int] = set()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what is saved inside the block; values are not changed."""
        with torch.autograd.graph.saved_tensors_hooks(self._note, lambda saved: saved):
            yield

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        is_parameter = isinstance(tensor, torch.nn.Parameter) or isinstance(
            tensor._base, torch.nn.Parameter
        )
        if not is_parameter and storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.total += storage.nbytes()
        return tensor


def run_forward(
    chunks: Sequence[torch.nn.Module],
    inputs: Sequence[Input],
    *,
    call: ModelCall[Input],
    finish: Callable[[Tensor, Input], Output],
    max_tokens: int,
) -> list[Output]:
    """Forward passes without gradients.

    Collective over the replica; every rank passes equally many inputs.

    Returns:
        `finish(output, input)` of each micro-batch on the last stage, an empty list elsewhere.
    """

    def step(iterator: Any, module: torch.nn.Module) -> tuple[Tensor, Callable[..., Output]]:
        item = next(iterator)
        output = call(module, item)
        return output, lambda result, non_loss_data: finish(result, item)

    with torch.no_grad():
        return _run(chunks, inputs, step, max_tokens, forward_only=True)


def run_forward_backward(
    chunks: Sequence[torch.nn.Module],
    inputs: Sequence[Input],
    *,
    call: ModelCall[Input],
    loss: Callable[[Tensor, Input], LossSum],
    max_tokens: int,
) -> tuple[Tally, int]:
    """Forward and backward passes; gradients are left reduced and divided in the main-grad buffers.

    Collective over the replica and over DP (gradients are reduce-scattered at the end).

    Returns:
        The tally of all micro-batches on the last stage, an empty one elsewhere; and the bytes that
        the first micro-batch's forward pass left on this rank for its backward pass.
    """
    saved = SavedBytes()

    def step(iterator: Any, module: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        item = next(iterator)
        with saved.counting() if item is inputs[0] else nullcontext():
            output = call(module, item)

        def three_values(result: Tensor) -> tuple[Tensor, Tensor, Tally]:
            made = loss(result, item)
            return made.total, made.denominator.to(torch.int), made.tally

        return output, three_values

    merged = Tally()
    for tally in _run(chunks, inputs, step, max_tokens, forward_only=False):
        merged.merge(tally)
    return merged, saved.total


def _run(
    chunks: Sequence[torch.nn.Module],
    inputs: Sequence[Input],
    step: Callable[..., Any],
    max_tokens: int,
    *,
    forward_only: bool,
) -> list[Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    schedule = get_forward_backward_func()
    interleaved = len(chunks) > 1
    # seq_length sizes the buffers of fixed-shape pipelines only; ours exchange shapes.
    result: list[Any] = schedule(
        forward_step_func=step,
        data_iterator=[iter(inputs) for _ in chunks] if interleaved else iter(inputs),
        model=list(chunks) if interleaved else chunks[0],
        num_microbatches=len(inputs),
        seq_length=max_tokens,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return result


def broadcast_from_last_stage(value: Tensor) -> Tensor:
    """The last stage's tensor on every stage, in place. Collective over the pipeline group."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        torch.distributed.broadcast(value, src=last, group=group)
    return value
