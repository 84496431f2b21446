"""Weights and optimizer state of a model under Megatron's FSDP, by torch's distributed checkpoint.

The format of one model's folder is Megatron's idea of `fsdp_dtensor`: every weight and every moment
is a DTensor whose rows are spread unevenly over DP, and each rank writes its rows under the name of
the parameter. Weights are the optimizer's main weights, float32 also for a bfloat16 model. Keys:

    model.NAME                   main weight; a router's bias, whole
    optimizer.state.NAME.KEY     moment (`exp_avg`, `exp_avg_sq`); a step count, where kept there
    optimizer.groups             parameter names and settings of each group
    scheduler.KEY                of the learning-rate schedule

Not Megatron's, so a folder of Megatron-LM's does not load: it keeps a group's settings once a
parameter, and halves gated weights, both to load in another tensor-parallel layout, which is left
out here. Its preparation of a state dict (uneven_dtensor.py:229 of megatron-core 0.16.1) talks once
a tensor, while a rank without rows of a parameter has no moments of it
(param_and_grad_buffer.py:2664), so that ranks would wait for different tensors; here ranks talk
once a parameter, which all have, and moments take the places of its rows. Left out: Transformer
Engine's extra state (the history of fp8's delayed scaling).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor

from megappo.distributed import fsdp
from megappo.distributed.grad_sync import Trainable
from megappo.distributed.offload import inner_optimizers
from megappo.errors import CheckpointError, SaveError
from megappo.models.weights import router_biases


def save(folder: Path, model: Trainable) -> None:
    """Writes a model into an empty folder. Collective over the world.

    Raises:
        SaveError: a rank could not write; on all ranks, none of which writes any more.
    """
    try:
        dcp.save(_state(model), checkpoint_id=str(folder))
    except dcp.CheckpointException as error:
        rank, (problem, _) = next(iter(sorted(error.failures.items())))
        raise SaveError(f"failed on rank {rank}: {type(problem).__name__}: {problem}") from error


def held_bytes(model: Trainable) -> int:
    """Bytes of weights and moments that this rank writes; routers' biases, small, are left out."""
    (optimizer,) = inner_optimizers(model.optimizer)
    tensors = [p.main for chunk in model.chunks for p in fsdp.sharded_parameters(chunk)]
    tensors += [
        value
        for moments in optimizer.state.values()
        for value in moments.values()
        if isinstance(value, DTensor)
    ]
    return sum(tensor.to_local().nbytes for tensor in tensors)


def load(folder: Path, model: Trainable) -> None:
    """Fills weights, optimizer and scheduler from a folder that `save` wrote.

    Collective over the world.

    Raises:
        CheckpointError: the folder has other weights, or the optimizer's in other groups.
    """
    for chunk in model.chunks:
        fsdp.discard_gathered(chunk)
    _make_state(model)
    state = _state(model)
    groups = state["optimizer"]["groups"]
    _check_weights(folder, state["model"])
    dcp.load(state, checkpoint_id=str(folder))
    found = state["optimizer"]["groups"]
    if [g["params"] for g in found] != [g["params"] for g in groups]:
        raise CheckpointError(
            f"{folder} groups the parameters otherwise for the optimizer than this run does "
            f"({[len(g['params']) for g in found]} and {[len(g['params']) for g in groups]} of "
            "them): it is of another model or version; use a new trainer.run_dir"
        )
    model.optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": found})
    model.scheduler.load_state_dict(state["scheduler"])
    for chunk in model.chunks:
        fsdp.install_loaded(chunk)


def _state(model: Trainable) -> dict[str, Any]:
    """Everything of a model, as references. Collective over DP."""
    parameters = {p.name: p for chunk in model.chunks for p in fsdp.sharded_parameters(chunk)}
    weights = {name: parameter.main.detach() for name, parameter in parameters.items()}
    for weight in weights.values():
        _find_rows(weight)
    biases = {name: bias for chunk in model.chunks for name, bias in router_biases(chunk).items()}
    (optimizer,) = inner_optimizers(model.optimizer)
    names = {id(parameter.main): name for name, parameter in parameters.items()}
    moments = {names[id(parameter)]: dict(values) for parameter, values in optimizer.state.items()}
    for name, values in moments.items():
        for key, value in values.items():
            _take_rows(f"{name}.{key}", value, weights[name])
    groups = [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {
        "model": weights | biases,
        "optimizer": {"state": moments, "groups": groups},
        "scheduler": model.scheduler.state_dict(),
    }


def _find_rows(weight: DTensor) -> None:
    """Notes on this rank's part of a tensor where it lies in the whole. Collective over DP."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
        update_uneven_dtensor_chunk_metadata,
    )

    update_uneven_dtensor_chunk_metadata(weight)


def _take_rows(name: str, value: Any, weight: DTensor) -> None:
    """Gives a moment the notes of its weight; a number or a step count needs none."""
    if not isinstance(value, DTensor):
        assert not torch.is_tensor(value) or value.ndim == 0, f"{name} is no DTensor"
        return
    part, like = value.to_local(), weight.to_local()
    assert part.shape == like.shape, (name, part.shape, like.shape)
    for note in ("__create_chunk_list__", "__create_write_items__"):
        setattr(value._local_tensor, note, getattr(weight._local_tensor, note))


def _make_state(model: Trainable) -> None:
    """Has the optimizer make its moments, by a step on gradients of zero.

    Weight decay changes weights by it, so they must be loaded after. Parameters without rows here
    are left out, as by Megatron (distrib_optimizer.py:1141): fused Adam takes no empty tensor.
    """
    (optimizer,) = inner_optimizers(model.optimizer)
    if optimizer.state:
        return
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.to_local().numel():
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _check_weights(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Refuses a folder with other weights than the model's; all ranks come to the same result.

    Raises:
        CheckpointError: with the first few names and shapes.
    """
    prefix = "model."
    metadata = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    found = {
        name.removeprefix(prefix): tuple(entry.size)
        for name, entry in metadata.items()
        if name.startswith(prefix)
    }
    needed = {name: tuple(weight.shape) for name, weight in weights.items()}
    differing = [
        f"{name} {found.get(name, 'absent')} -> {needed.get(name, 'absent')}"
        for name in sorted(found.keys() | needed.keys())
        if found.get(name) != needed.get(name)
    ]
    if differing:
        raise CheckpointError(
            f"{folder} has {len(differing)} other weights than the model (checkpoint -> now): "
            f"{', '.join(differing[:5])}; use the model of then, or a new trainer.run_dir"
        )
