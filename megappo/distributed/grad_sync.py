"""Gradients over DP: Megatron's DistributedDataParallel, DistributedOptimizer and their scheduler.

After the backward pass each DP rank holds the summed gradient of its 1/DP of the parameters
(reduce-scatter), updates that part with its 1/DP of Adam's state in float32, and the parameters are
all-gathered. Weight decay spares norms and biases only because the scheduler applies each group's
multiplier: without it Megatron decays everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megappo.config.learning import OptimizerSection


class NonFiniteGradientError(RuntimeError):
    """The gradient norm is not a number or infinite; the weights were left as they were."""


@dataclass(frozen=True, kw_only=True)
class Trainable:
    """A model with its gradient buffers, optimizer and scheduler."""

    name: str
    chunks: Sequence[Any]
    """Megatron's DistributedDataParallel around each chunk."""
    optimizer: Any
    scheduler: Any

    @property
    def lr(self) -> float:
        """Learning rate of the next optimizer step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        """Clears gradient buffers before a mini-batch."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self) -> float:
        """One optimizer step; returns the gradient norm before clipping.

        Collective over the world: the norm is global, so all ranks step or none does.

        Raises:
            NonFiniteGradientError: before any weight is changed.
        """
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            raise NonFiniteGradientError(
                f"the {self.name}'s gradient norm is {norm}: no weight was changed. Lower the "
                f"learning rate ({self.lr}), or look for extreme rewards or log-probs in rollouts/"
            )
        success, _, _ = self.optimizer.step()
        assert success, "only loss scaling of fp16 can refuse a step"
        self.scheduler.step(1)
        return norm


def make_trainable(
    name: str,
    chunks: Sequence[torch.nn.Module],
    transformer_config: Any,
    *,
    optim: OptimizerSection,
    total_optimizer_steps: int,
) -> Trainable:
    """Wraps chunks for training. Collective over the world.

    Args:
        name: `actor` or `critic`, for messages.
        chunks: bare model chunks of this rank, weights loaded.
        transformer_config: the chunks' Megatron config; gets the hooks that the schedules call.
        optim: of this model.
        total_optimizer_steps: length of the learning-rate decay.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
    )
    wrapped = [DistributedDataParallel(transformer_config, ddp, chunk) for chunk in chunks]
    optimizer = _make_optimizer(wrapped, transformer_config, optim)
    transformer_config.calculate_per_token_loss = True
    transformer_config.finalize_model_grads_func = finalize_model_grads
    transformer_config.grad_scale_func = optimizer.scale_loss
    scheduler = _make_scheduler(optimizer, optim, total_optimizer_steps)
    return Trainable(
        name=name,
        chunks=wrapped,
        optimizer=optimizer,
        scheduler=scheduler,
    )


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
