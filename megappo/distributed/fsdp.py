"""Megatron-Core's fully sharded data parallel (FSDP), in place of DDP: CUDA only.

With DDP and the distributed optimizer each rank holds all weights and gradients of its model chunk
and 1/DP of the optimizer state. Here it holds 1/DP of all three; a layer's weights are gathered
just before the layer runs and freed after it, and its gradients are reduce-scattered during the
backward pass. Both exchanges overlap with computation always.

Line numbers are those of megatron-core 0.16.1, package `megatron.core.distributed.fsdp`: *adapter*
is `mcore_fsdp_adapter.py`, *fsdp*, *buffer* and *uneven* are `megatron_fsdp.py`,
`param_and_grad_buffer.py` and `uneven_dtensor.py` below `src/megatron_fsdp`.

Left out, and refused by `check`: tensor, pipeline and expert parallelism, and offload to the host.
Weights are exported parameter by parameter (`ShardedParameter.gather`); checkpoints have a format
of their own (`checkpoint.fsdp_dtensor`). Tests run all of it, Megatron's wrapper and optimizer too,
on gloo ranks where CUDA streams do nothing; not run: any of it on a GPU, so overlap, NCCL, memory,
Transformer Engine's layers and whether its fused Adam keeps moments as DTensors, which checkpoints
rely on.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

DDP_INSTEAD = (
    "or set parallel.fsdp=false: the distributed optimizer then shards optimizer state, not weights"
)


def check(device: str, *, num_chunks: int, config: Any, offload: Sequence[str] = ()) -> None:
    """Refuses what Megatron's FSDP, or our use of it, cannot do.

    Args:
        device: `cpu` or `cuda`.
        num_chunks: model chunks on this rank.
        config: Megatron's TransformerConfig.
        offload: parts of the model that are to move to the host.

    Raises:
        UserError: with every rule that is broken.
    """
    problems = []
    if device != "cuda":
        problems.append(
            f"it needs CUDA streams and NCCL, and the run is on {device}; use device=cuda"
        )
    # fsdp:92 names tensor, context and expert parallelism as compatible, not pipelines. A gathered
    # weight is taken for a whole one here, so tensor and expert shards are refused too.
    for field, degree in (
        ("parallel.tp", config.tensor_model_parallel_size),
        ("parallel.pp", config.pipeline_model_parallel_size),
        ("parallel.ep", config.expert_model_parallel_size),
    ):
        if degree > 1:
            problems.append(f"{field} is {degree}; use 1")
    if num_chunks > 1:
        problems.append(f"a rank has {num_chunks} model chunks; use no virtual pipeline stages")
    if offload:
        problems.append(
            f"{' and '.join(offload)} shall be offloaded, and it moves memory by itself; offload "
            "nothing"
        )
    if config.gradient_accumulation_fusion:
        problems.append("gradients are accumulated within the matrix product; use no fusion")
    # adapter:364 asserts it, once the model is built.
    if importlib.util.find_spec("einops") is None:
        problems.append("Python package einops is missing; install it")
    if problems:
        raise UserError(f"parallel.fsdp is true, but {'; '.join(problems)}; {DDP_INSTEAD}")


def wrap(chunks: Sequence[torch.nn.Module], config: Any) -> list[Any]:
    """Megatron's FSDP around each chunk, which must be on its CUDA device, weights loaded.

    Collective over DP. The unit that is gathered and freed is a transformer layer (adapter:97).

    Args:
        chunks: bare model chunks.
        config: Megatron's TransformerConfig, with `calculate_per_token_loss`: gradients are summed
            over DP, not averaged (fsdp:323).
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    assert config.calculate_per_token_loss, "gradients would be averaged over DP"
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        grad_reduce_in_fp32=True,
        # fsdp:274-279 turns both on for this strategy; said here so that the hooks are set.
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        # DDP fills this in itself (distributed_data_parallel.py:64), FSDP does not.
        bucket_size=max(40_000_000, 1_000_000 * ranks),
    )
    return [FullyShardedDataParallel(config, ddp, chunk) for chunk in chunks]


def is_managed(parameter: Tensor) -> bool:
    """Whether a parameter found in a module belongs to FSDP: a shard, or whole for a while only."""
    # fsdp:293 and :1228 mark both objects that a module has under one name.
    return bool(getattr(parameter, "__fsdp_param__", False))


def is_sharded(chunk: Any) -> bool:
    """Whether a chunk is one of `wrap`'s; False for a bare one and one in Megatron's DDP."""
    from megatron.core.distributed import FullyShardedDataParallel

    return isinstance(chunk, FullyShardedDataParallel)


@dataclass(frozen=True, kw_only=True)
class ShardedParameter:
    """A parameter whose rows, along its first dim, are spread over DP in rank order."""

    name: str
    """Within the bare chunk."""
    main: DTensor
    """What the optimizer updates; float32 also where the model is bfloat16 (buffer:2488-2557)."""
    dtype: torch.dtype
    """Of the model's weight."""

    @property
    def shape(self) -> torch.Size:
        """Of the whole weight."""
        return self.main.shape

    @property
    def device(self) -> torch.device:
        """Where this rank's rows are, and the gathered weight will be."""
        return self.main.device

    def gather(self) -> Tensor:
        """The whole weight in the model's dtype, a new tensor. Collective over DP.

        Megatron's own function (uneven:246) hands tensors of unequal size to one all-gather, which
        NCCL takes and gloo does not; here each rank that has rows broadcasts them.
        """
        group = self.main.device_mesh.get_group()
        rows = self.main.detach().to_local().to(self.dtype)
        counts = _counts(rows, group)
        assert sum(counts) == self.shape[0], (self.name, counts, self.shape)
        whole = torch.empty(self.shape, dtype=self.dtype, device=rows.device)
        for rank, part in enumerate(whole.split(counts)):
            if rank == group.rank():
                part.copy_(rows)
            if part.numel():
                dist.broadcast(part, dist.get_global_rank(group, rank), group=group)
        return whole


def _counts(rows: Tensor, group: Any) -> list[int]:
    """First size of every rank's tensor. Collective over the group."""
    counts = [torch.zeros(1, dtype=torch.long, device=rows.device) for _ in range(group.size())]
    dist.all_gather(counts, torch.full_like(counts[0], len(rows)), group=group)
    return [int(count) for count in counts]


def sharded_parameters(chunk: Any) -> list[ShardedParameter]:
    """Every parameter of a chunk of `wrap`'s, equal names in equal order on all DP ranks."""
    return [
        ShardedParameter(name=name, main=parameter, dtype=parameter.orig_param.dtype)
        for name, parameter in chunk.param_and_grad_buffer.optimizer_named_parameters
    ]


def discard_gathered(chunk: Any) -> None:
    """Waits for gathers that are under way and frees what they brought. Collective over DP.

    After it no forward pass sees weights from before (fsdp:1156): for before a load.
    """
    chunk.module.synchronize_param_gather()


def install_loaded(chunk: Any) -> None:
    """Makes the model's shards follow the optimizer's main weights, just loaded (fsdp:1296)."""
    chunk.module.install_optimized_model_weights()
