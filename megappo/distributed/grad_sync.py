"""Gradients over DP: Megatron's DistributedDataParallel, DistributedOptimizer and their scheduler.

After the backward pass each DP rank holds the summed gradient of its 1/DP of the parameters
(reduce-scatter), updates that part with its 1/DP of Adam's state in float32, and the parameters are
all-gathered. Weight decay spares norms and biases only because the scheduler applies each group's
multiplier: without it Megatron decays everything.

Either exchange can hide behind computation. `overlap_grad_reduce` reduces a bucket of gradients
while the backward pass makes the next one; `GradSync` measures what is left to wait for.
`overlap_param_gather` gathers parameters while the next forward pass runs, so until then a rank
holds new values of its own share alone: `Trainable.step` gathers at once unless it is told that a
forward pass comes next. Megatron's fully sharded form stands in `fsdp.py`. Left out: gathering
during the optimizer step of an interleaved pipeline.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megappo.config.learning import OptimizerSection
from megappo.distributed import fsdp as fully_sharded
from megappo.distributed.offload import PARTS, Offloader, Part, on_device


class NonFiniteGradientError(RuntimeError):
    """The gradient norm is not a number or infinite; the weights were left as they were."""


class GradSync:
    """Megatron's end of a backward pass, with the time that it takes.

    By then gradients that were reduced during the backward pass are there, so the seconds show what
    `overlap_grad_reduce` hides. Waiting for slower ranks counts too.
    """

    def __init__(self, device: torch.device) -> None:
        self.wait_s = 0.0
        """Seconds so far."""
        self.before: Callable[[], None] = lambda: None
        """Called first, on all ranks: here they meet after forward and backward passes."""
        self.num_met = 0
        """Times that they did."""
        self._device = device

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """See Megatron's `finalize_model_grads`; collective over the world."""
        from megatron.core.distributed import finalize_model_grads

        self.before()
        self.num_met += 1
        start = self._now()
        finalize_model_grads(*args, **kwargs)
        self.wait_s += self._now() - start

    def _now(self) -> float:
        # This stream's work alone: communication that nothing waits for yet is still hidden.
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return time.perf_counter()


@dataclass
class LearningRateLimit:
    """The highest learning rate that a model may have, whatever its schedule says."""

    value: float = math.inf

    def apply(self, optimizer: Any) -> None:
        """Brings the rates that the scheduler has set down to the limit."""
        for group in optimizer.param_groups:
            group["lr"] = min(group["lr"], self.value)


@dataclass(frozen=True, kw_only=True)
class Trainable:
    """A model with its gradient buffers, optimizer and scheduler."""

    name: str
    chunks: Sequence[Any]
    """Megatron's wrapper around each chunk."""
    optimizer: Any
    scheduler: Any
    grad_sync: GradSync
    memory: Offloader | None
    """Moves the model between device and host; None under fully sharded data parallel."""
    lr_limit: LearningRateLimit = field(default_factory=LearningRateLimit)

    @property
    def lr(self) -> float:
        """Learning rate of the next optimizer step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        """Clears gradient buffers before a mini-batch.

        Raises:
            OffloadedError: they are in host memory.
        """
        self._require("params", "grads")
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self, *, settle: bool = True) -> float:
        """`gradient_norm` and `apply`; returns the norm. Collective over the world."""
        norm = self.gradient_norm()
        self.apply(norm, settle=settle)
        return norm

    def gradient_norm(self) -> float:
        """The norm of a mini-batch's gradient before clipping, equal on all ranks.

        Collective over the world.

        Raises:
            OffloadedError: a part of the model is in host memory.
        """
        self._require(*PARTS)
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def apply(self, norm: float, *, settle: bool = True) -> None:
        """One optimizer step with the gradient of this norm.

        Collective over the world: the norm is global, so all ranks step or none does.

        Args:
            norm: of `gradient_norm`.
            settle: whether all weights are new when this returns. False lets the next training
                forward gather them while it runs (`overlap_param_gather`); anything else that
                reads weights must call `settle()` first.

        Raises:
            NonFiniteGradientError: before any weight is changed.
        """
        if not math.isfinite(norm):
            raise NonFiniteGradientError(
                f"the {self.name}'s gradient norm is {norm}: no weight was changed. "
                f"{self.first_non_finite()}. Lower the "
                f"learning rate ({self.lr}), or look for extreme rewards or log-probs in rollouts/"
            )
        success, _, _ = self.optimizer.step()
        assert success, "only loss scaling of fp16 can refuse a step"
        self.scheduler.step(1)
        self.limit_lr(self.lr_limit.value)
        if settle:
            self.settle()

    def limit_lr(self, value: float) -> None:
        """No higher learning rate than this, from the next optimizer step on."""
        self.lr_limit.value = value
        self.lr_limit.apply(self.optimizer)

    def first_non_finite(self) -> str:
        """Which gradient is not finite, as a sentence. Collective over the world."""
        return _first_non_finite(self.chunks)

    def settle(self) -> None:
        """Gathers parameters that a step left to the next forward pass; else does nothing.

        Collective over DP. Needed before weights are read other than by a training forward: export,
        checkpoint, offload. Parameters that are away are fetched for it.
        """
        groups = list(_unsettled(self.chunks))
        if groups:
            with on_device(self.memory, "params"):
                for group in groups:
                    group.start_param_sync(force_sync=True)

    def _require(self, *parts: Part) -> None:
        if self.memory is not None:
            self.memory.require(*parts)


def _unsettled(chunks: Sequence[Any]) -> Iterator[Any]:
    """Bucket groups whose gather has not begun or not ended; the same ones on all DP ranks."""
    for chunk in chunks:
        if not chunk.ddp_config.overlap_param_gather or chunk.ddp_config.use_megatron_fsdp:
            continue
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            if not group.param_gather_dispatched or group.param_gather_handle is not None:
                yield group


def _first_non_finite(chunks: Sequence[Any]) -> str:
    """Which gradient is not finite, as a sentence. Collective over the world.

    A rank's buffer holds its share of the sums, and what it added itself elsewhere, so the rank
    where a value went wrong sees it.
    """
    if chunks[0].ddp_config.use_megatron_fsdp:
        return "Which one is not known under parallel.fsdp"
    mine = next(
        (
            name
            for chunk in chunks
            for name, parameter in chunk.module.named_parameters()
            if parameter.requires_grad and not parameter.main_grad.isfinite().all()
        ),
        None,
    )
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    named = [(rank, name) for rank, name in enumerate(found) if name is not None]
    if not named:
        return "Each gradient is finite, the sum of their squares is not"
    rank, name = named[0]
    return f"The first that is not finite is {name} (rank {rank}; {len(named)} ranks have any)"


def make_trainable(
    name: str,
    chunks: Sequence[torch.nn.Module],
    transformer_config: Any,
    *,
    optim: OptimizerSection,
    total_optimizer_steps: int,
    overlap_grad_reduce: bool = False,
    overlap_param_gather: bool = False,
    fsdp: bool = False,
    offload: Sequence[Part] = (),
) -> Trainable:
    """Wraps chunks for training. Collective over the world.

    Args:
        name: `actor` or `critic`, for messages.
        chunks: bare model chunks of this rank, weights loaded.
        transformer_config: the chunks' Megatron config, of this model alone; gets the hooks that
            the schedules call.
        optim: of this model.
        total_optimizer_steps: length of the learning-rate decay.
        overlap_grad_reduce: reduce gradients during the backward pass.
        overlap_param_gather: gather parameters during the next forward pass.
        fsdp: shard parameters and gradients too; CUDA only.
        offload: what the model's `memory.offload()` moves to the host.

    Raises:
        UserError: `fsdp` where it cannot be had.
    """
    device = next(chunks[0].parameters()).device
    if fsdp:
        fully_sharded.check(
            device.type, num_chunks=len(chunks), config=transformer_config, offload=offload
        )
        wrapped = fully_sharded.wrap(chunks, transformer_config)
    else:
        wrapped = _wrap(
            chunks,
            transformer_config,
            overlap_grad_reduce=overlap_grad_reduce,
            overlap_param_gather=overlap_param_gather,
        )
    optimizer = _make_optimizer(wrapped, transformer_config, optim)
    grad_sync = GradSync(device)
    _set_hooks(transformer_config, wrapped, optimizer, grad_sync)
    return Trainable(
        name=name,
        chunks=wrapped,
        optimizer=optimizer,
        scheduler=_make_scheduler(optimizer, optim, total_optimizer_steps),
        grad_sync=grad_sync,
        memory=None if fsdp else _make_offloader(name, chunks, wrapped, optimizer, offload),
    )


def _wrap(
    chunks: Sequence[torch.nn.Module],
    transformer_config: Any,
    *,
    overlap_grad_reduce: bool,
    overlap_param_gather: bool,
) -> list[Any]:
    """Megatron's DDP around each chunk; parameters become views into its buffers."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    # One object for all chunks: the optimizer insists that they are equal, and the wrapper fills
    # in the bucket size.
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
    )
    # Later chunks of an interleaved pipeline exchange while another chunk computes anyway.
    return [
        DistributedDataParallel(transformer_config, ddp, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def _make_offloader(
    name: str,
    chunks: Sequence[torch.nn.Module],
    wrapped: Sequence[Any],
    optimizer: Any,
    parts: Sequence[Part],
) -> Offloader:
    buffers = [b for ddp in wrapped for b in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    return Offloader(name, chunks, buffers=buffers, optimizer=optimizer, parts=parts)


def _set_hooks(
    transformer_config: Any, wrapped: Sequence[Any], optimizer: Any, grad_sync: GradSync
) -> None:
    """What Megatron's schedules call, as its own `training.py` sets it."""
    transformer_config.calculate_per_token_loss = True
    transformer_config.finalize_model_grads_func = grad_sync
    transformer_config.grad_scale_func = optimizer.scale_loss
    if not wrapped[0].ddp_config.overlap_grad_reduce:
        return
    assert transformer_config.no_sync_func is None, "the config belongs to another model already"
    # Buckets go out in the backward pass of the last micro-batch only. Pipeline stages start them
    # together (Megatron's align_grad_reduce), or early stages would slow down late ones.
    transformer_config.no_sync_func = _one_or_list([ddp.no_sync for ddp in wrapped])
    transformer_config.grad_sync_func = _one_or_list([ddp.start_grad_sync for ddp in wrapped])


def _one_or_list(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions


def _make_optimizer(
    wrapped: Sequence[Any], transformer_config: Any, optim: OptimizerSection
) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settings = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad,
        bf16=transformer_config.bf16,
        params_dtype=transformer_config.params_dtype,
        use_distributed_optimizer=True,
    )
    return get_megatron_optimizer(settings, list(wrapped))


def _make_scheduler(optimizer: Any, optim: OptimizerSection, total_steps: int) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if optim.lr_warmup_steps else optim.lr,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=optim.lr_warmup_steps,
        lr_decay_steps=max(total_steps, optim.lr_warmup_steps + 1),
        lr_decay_style=optim.lr_decay_style,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=max(total_steps, 1),
        wd_incr_style="constant",
        # A resumed run takes up the step count of its checkpoint and the settings of its config.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
