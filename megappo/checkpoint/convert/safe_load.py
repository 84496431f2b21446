"""`torch.load` of Megatron's own files with `weights_only=True`: no code in them is run.

Beside tensors Megatron stores its arguments, optimizer settings and random streams. Of the classes
that these are made of only `Namespace` and its like are real here; all others, which nobody reads,
become an `Opaque`.
"""

from __future__ import annotations

import pickle
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megappo.errors import CheckpointError


class Opaque:
    """Stands for an object that is not needed."""

    def __init__(self, *values: Any, **named: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        pass

    def __hash__(self) -> int:
        return hash(len(self.values))


_OPAQUE = (
    "_codecs.encode",
    "_io.BytesIO",
    "megatron.core.enums.ModelType",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.transformer.enums.LayerType",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.dtype",
    "numpy.dtypes.UInt32DType",
    "numpy.ndarray",
    "pathlib.PosixPath",
    "signal.Signals",
)


def safe_load(path: Path, *, memory_mapped: bool = False) -> Any:
    """Content of a file that `torch.save` wrote.

    Args:
        path: The file.
        memory_mapped: Tensors stay in the file until they are read.

    Raises:
        CheckpointError: damaged, or with a class that Megatron does not store.
    """
    try:
        with _only_allowed():
            return torch.load(path, map_location="cpu", weights_only=True, mmap=memory_mapped)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        first = str(error).strip().splitlines()
        raise CheckpointError(
            f"{path} cannot be loaded safely: {_reason(first)}; it is damaged, or holds more than "
            "Megatron stores, which is never loaded as it could run any code"
        ) from error


@contextmanager
def _only_allowed() -> Iterator[None]:
    """Sets torch's list of safe classes, and brings back what it was.

    Megatron adds numpy's real classes when it is imported, some of which torch then cannot build.
    """
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(
        [Namespace, SimpleNamespace, *((Opaque, name) for name in _OPAQUE)]
    )
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _reason(lines: list[str]) -> str:
    for line in lines:
        if "GLOBAL" in line or "Unsupported" in line:
            return line.strip()
    return lines[0] if lines else "no reason given"
