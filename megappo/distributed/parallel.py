"""Ranks, degrees and groups of one run: TP x CP x DP x PP, tensor parallel innermost.

Experts of a mixture have a split of their own over the same ranks: ETP x EP x (expert DP) x PP, so
EP cuts across TP, CP and DP. Megatron owns the groups that carry tensors of the model. Ours carry
Python objects and statistics over gloo, on CPU, so that they never queue behind device work and
have a time limit of their own.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.config.layout import ParallelSection
from megappo.distributed import cpu_backend
from megappo.distributed.environment import LaunchEnvironment
from megappo.errors import UserError


def resolve_device(requested: str) -> str:
    """`cpu` or `cuda` for a config's `device`.

    Raises:
        UserError: cuda is asked for and there is none.
    """
    available = torch.cuda.is_available()
    if requested == "cuda" and not available:
        raise UserError("device is 'cuda': PyTorch finds no CUDA device here; use device=cpu")
    if requested == "auto":
        return "cuda" if available else "cpu"
    return requested


def check_device(device: str, launch: LaunchEnvironment) -> None:
    """Looks at what a device needs, before anything is built on it.

    Raises:
        UserError: another Megatron version than the tested one; on CUDA fewer devices than ranks of
            this node, no Transformer Engine, or the package `apex` that is not NVIDIA's.
    """
    cpu_backend.check_version()
    if device != "cuda":
        return
    count = torch.cuda.device_count()
    if launch.local_rank >= count:
        raise UserError(
            f"local rank {launch.local_rank} has no device: {count} CUDA devices are visible; "
            "start as many ranks as devices, or use device=cpu"
        )
    if importlib.util.find_spec("transformer_engine") is None:
        raise UserError(
            "device cuda needs Transformer Engine, which is not installed: see docs/gpu.md, or use "
            "device=cpu with CUDA_VISIBLE_DEVICES=''"
        )
    apex = importlib.util.find_spec("apex")
    if apex is not None and importlib.util.find_spec("apex.multi_tensor_apply") is None:
        raise UserError(
            "the installed package apex is an unrelated one, and Megatron would take it for "
            "NVIDIA's: pip uninstall apex (docs/gpu.md says how NVIDIA's is installed)"
        )


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """How many ranks split what; data parallelism is what is left."""

    tp: int = 1
    """matrices"""
    pp: int = 1
    """layers, in stages"""
    vp: int = 1
    """chunks of layers on each stage: virtual pipeline"""
    cp: int = 1
    """sequences"""
    ep: int = 1
    """experts"""
    etp: int = 1
    """matrices of one expert"""

    @classmethod
    def of(cls, layout: ParallelSection) -> Degrees:
        """The degrees of a config."""
        return cls(
            tp=layout.tp,
            pp=layout.pp,
            vp=layout.vpp,
            cp=layout.cp,
            ep=layout.ep,
            etp=layout.expert_tp,
        )


@dataclass(frozen=True, kw_only=True)
class ParallelContext:
    """This rank's place in the layout. Built by `start`; passed as an argument, never global."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    tp: int
    pp: int
    vp: int
    cp: int
    ep: int
    etp: int
    dp: int
    tp_rank: int
    pp_rank: int
    cp_rank: int
    dp_rank: int
    world_group: Any
    """gloo, all ranks"""
    model_group: Any
    """gloo, the TP x PP x CP ranks that hold one replica and train on the same samples"""
    data_group: Any
    """gloo, ranks with the same shard of the model over DP"""

    @property
    def is_main(self) -> bool:
        """The rank that talks to the user and writes the run's shared files."""
        return self.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether logits, values and losses come into being on this rank."""
        return self.pp_rank == self.pp - 1

    @property
    def model_rank(self) -> int:
        """This rank's number inside its replica: TP fastest, then CP, then PP."""
        return self.tp_rank + self.tp * (self.cp_rank + self.cp * self.pp_rank)

    @property
    def model_size(self) -> int:
        """Ranks of one replica."""
        return self.tp * self.cp * self.pp

    @property
    def reports_losses(self) -> bool:
        """True on the ranks whose losses, summed, count every token of a replica once."""
        return self.is_last_stage and self.tp_rank == 0

    @property
    def reports_samples(self) -> bool:
        """True on exactly one rank of each replica, one that has the losses."""
        return self.reports_losses and self.cp_rank == 0


def start(
    launch: LaunchEnvironment,
    degrees: Degrees,
    *,
    device: str,
    seed: int,
    timeout_s: float,
    store: dist.Store | None = None,
) -> ParallelContext:
    """Joins the process group and builds all groups. Collective over the world.

    Args:
        launch: from torchrun.
        degrees: of the layout.
        device: `cpu` (gloo) or `cuda` (NCCL; the device of this local rank).
        seed: of Megatron's random streams.
        timeout_s: limit of one collective, seconds.
        store: where ranks of several nodes have met already (`node_agreement`).
    """
    cpu_backend.install(device)
    timeout = datetime.timedelta(seconds=timeout_s)
    _join(launch, device, timeout, store)
    place = torch.device("cuda", launch.local_rank) if device == "cuda" else torch.device("cpu")

    from megatron.core import parallel_state, tensor_parallel

    tp, pp, cp = degrees.tp, degrees.pp, degrees.cp
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=degrees.vp if degrees.vp > 1 else None,
        context_parallel_size=cp,
        expert_model_parallel_size=degrees.ep,
        expert_tensor_parallel_size=degrees.etp,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    dp = launch.world_size // (tp * pp * cp)
    return ParallelContext(
        rank=launch.rank,
        world_size=launch.world_size,
        local_rank=launch.local_rank,
        device=place,
        tp=tp,
        pp=pp,
        vp=degrees.vp,
        cp=cp,
        ep=degrees.ep,
        etp=degrees.etp,
        dp=dp,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        world_group=dist.new_group(backend="gloo", timeout=timeout),
        model_group=group_of(
            launch.rank, replicas(tp=tp, cp=cp, dp=dp, pp=pp), timeout_s=timeout_s
        ),
        data_group=parallel_state.get_data_parallel_group_gloo(),
    )


def _join(
    launch: LaunchEnvironment, device: str, timeout: datetime.timedelta, store: dist.Store | None
) -> None:
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(launch.local_rank)
    if launch.world_size == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
        return
    if store is None:
        found, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        # On one node torchrun's default rendezvous gives a restarted run the store of the run that
        # failed, with the addresses of ranks that are gone.
        store = dist.PrefixStore(f"attempt{launch.restarts}", found)
    store.set_timeout(timeout)
    dist.init_process_group(
        backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout
    )


def replicas(*, tp: int, cp: int, dp: int, pp: int) -> list[list[int]]:
    """The ranks of each replica, ascending, in the order of DP ranks."""
    return [
        [t + tp * (c + cp * (d + dp * p)) for p in range(pp) for c in range(cp) for t in range(tp)]
        for d in range(dp)
    ]


def group_of(rank: int, parts: Sequence[Sequence[int]], *, timeout_s: float) -> Any:
    """One gloo group for each part; returns that of this rank. Collective over the world.

    Args:
        rank: this one.
        parts: disjoint sets of ranks, the same on every rank; one of them has this rank.
        timeout_s: limit of one collective, seconds.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    mine = None
    for part in parts:
        group = dist.new_group(list(part), backend="gloo", timeout=timeout)
        if rank in part:
            mine = group
    assert mine is not None
    return mine


def all_gather_objects(value: Any, group: Any) -> list[Any]:
    """Each rank's object, in group order. Collective over `group` (gloo). For control data only."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def gather_objects(value: Any, group: Any) -> list[Any]:
    """Each rank's object on the world's rank 0, nothing elsewhere. Collective over `group` (gloo).

    Rank 0 must be of the group.
    """
    on_main = dist.get_rank() == 0
    gathered: list[Any] = [None] * dist.get_world_size(group) if on_main else []
    dist.gather_object(value, gathered if on_main else None, dst=0, group=group)
    return gathered


def tensor_parallel_group() -> Any:
    """The ranks that split this rank's matrices, as Megatron's collectives use them."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def barrier(context: ParallelContext) -> None:
    """Collective over the world."""
    dist.barrier(group=context.world_group)


def any_rank(flag: bool, context: ParallelContext) -> bool:
    """Whether the flag is set on any rank. Collective over the world."""
    box = torch.tensor(int(flag))
    dist.all_reduce(box, op=dist.ReduceOp.MAX, group=context.world_group)
    return bool(box.item())


def max_over_data(value: int, context: ParallelContext) -> int:
    """Largest of a number over DP. Collective over DP."""
    box = torch.tensor(value)
    dist.all_reduce(box, op=dist.ReduceOp.MAX, group=context.data_group)
    return int(box.item())


def sum_over_data(values: Tensor, context: ParallelContext) -> Tensor:
    """Sum of a CPU tensor over DP; equal on all ranks of a replica. Collective over DP."""
    total = values.clone()
    dist.all_reduce(total, group=context.data_group)
    return total


def stop(context: ParallelContext) -> None:
    """Leaves all groups. Collective over the world after a run that went well."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@contextmanager
def all_ranks_or_none(context: ParallelContext, what: str) -> Iterator[None]:
    """Runs a block in which one rank alone may fail; then every rank raises, naming that rank.

    Collective over the world. For parts without collectives of their own (an engine's start, a file
    that only rank 0 writes), where the others would otherwise wait until a time-out.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    summary = f"{type(problem).__name__}: {problem}" if problem else None
    told = all_gather_objects(summary, context.world_group)
    if problem is not None:
        raise problem
    failed = [(rank, text) for rank, text in enumerate(told) if text]
    if failed:
        rank, text = failed[0]
        raise RuntimeError(f"{what} failed on rank {rank}: {text}")
