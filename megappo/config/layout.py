"""The sections of how a model is spread over ranks, and what is kept in device memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megappo.config.fields import Problems, opt

M = "actor_rollout_ref.actor.megatron."


@dataclass(frozen=True, kw_only=True)
class ParallelSection:
    """Ranks = TP x PP x CP x DP; DP is what is left. The same for all roles."""

    tp: int = opt(1, "tensor parallel size", verl=M + "tensor_model_parallel_size")
    pp: int = opt(1, "pipeline stages", verl=M + "pipeline_model_parallel_size")
    vpp: int = opt(
        1, "chunks of layers on each stage (interleaved 1F1B); 1: none",
        verl=M + "virtual_pipeline_model_parallel_size",
    )  # fmt: skip
    pipeline_layers: list[int] = opt(
        [],
        "layers of each of the pp x vpp chunks, in the model's order; empty: as even as can be. "
        "For models of another depth than the actor's: always even",
    )
    cp: int = opt(1, "context parallel size", verl=M + "context_parallel_size")
    ep: int = opt(1, "expert parallel size", verl=M + "expert_model_parallel_size")
    etp: int = opt(
        0, "tensor parallel size of one expert; 0: as tp",
        verl=M + "expert_tensor_parallel_size",
    )  # fmt: skip
    sequence_parallel: bool = opt(
        False, "split activations over TP outside the matrix products",
        verl=M + "sequence_parallel",
    )  # fmt: skip
    packed: bool = opt(
        True, "sequences end to end without padding; false pads each micro-batch to its longest",
        verl="actor_rollout_ref.model.use_remove_padding",
    )  # fmt: skip
    overlap_grad_reduce: bool = opt(
        False, "reduce-scatter gradients while the backward pass runs",
        verl=M + "override_ddp_config.overlap_grad_reduce",
    )  # fmt: skip
    overlap_param_gather: bool = opt(
        False, "all-gather updated weights while the next forward pass runs",
        verl=M + "override_ddp_config.overlap_param_gather",
    )  # fmt: skip
    fsdp: bool = opt(
        False, "Megatron's fully sharded data parallel in place of its distributed optimizer; CUDA"
    )

    @property
    def expert_tp(self) -> int:
        """Tensor parallel size of one expert in force."""
        return self.etp or self.tp

    def __post_init__(self) -> None:
        p = Problems()
        p.positive(tp=self.tp, pp=self.pp, vpp=self.vpp, cp=self.cp, ep=self.ep)
        p.not_negative(etp=self.etp)
        p.require(self.vpp == 1 or self.pp > 1, "vpp", self.vpp, "it needs parallel.pp over 1")
        chunks = self.pp * self.vpp
        p.require(
            not self.pipeline_layers or len(self.pipeline_layers) == chunks,
            "pipeline_layers", self.pipeline_layers,
            f"it must have {chunks} counts, one a chunk (pp {self.pp} x vpp {self.vpp})",
        )  # fmt: skip
        p.require(
            not self.sequence_parallel or self.tp > 1,
            "sequence_parallel", self.sequence_parallel, "it needs parallel.tp over 1",
        )  # fmt: skip
        p.require(
            not self.overlap_param_gather or self.overlap_grad_reduce,
            "overlap_param_gather", self.overlap_param_gather,
            "it needs parallel.overlap_grad_reduce=true",
        )  # fmt: skip
        p.done()


@dataclass(frozen=True, kw_only=True)
class MemorySection:
    """What a trained model keeps in device memory, and when."""

    recompute: Literal["none", "selective", "full"] = opt(
        "none",
        "activations computed again in the backward pass: none, the core attention's, or whole "
        "layers",
        verl="recompute_granularity",
    )
    param_offload: bool = opt(
        False, "weights stay in host memory while the model is not in use", verl="param_offload"
    )
    grad_offload: bool = opt(
        False, "gradient buffers are freed outside the update", verl="grad_offload"
    )
    optimizer_offload: bool = opt(
        False, "optimizer state stays in host memory outside the update", verl="optimizer_offload"
    )
