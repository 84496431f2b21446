"""What `install` promises, checked in a fresh process; the first argument names the check."""

from __future__ import annotations

import importlib.metadata
import sys

from megappo.distributed import cpu_backend
from megappo.errors import UserError


def twice() -> None:
    """The second call changes nothing, and other libraries still see a machine without CUDA."""
    cpu_backend.install("cpu")
    import torch
    from megatron.core.transformer.moe import moe_utils

    before = (torch.cuda.current_stream, moe_utils.maybe_move_tensor_to_cpu, len(sys.meta_path))
    cpu_backend.install("cpu")
    after = (torch.cuda.current_stream, moe_utils.maybe_move_tensor_to_cpu, len(sys.meta_path))
    assert before == after
    assert not torch.cuda.is_available()
    assert torch.compile.__module__ == "torch"
    assert isinstance(torch.cuda.Stream, type)
    assert torch.cuda.Stream | None


def cuda() -> None:
    """Nothing is changed, and nothing imported."""
    cpu_backend.install("cuda")
    assert not any(name.startswith("megatron") for name in sys.modules)


def late() -> None:
    """Megatron was imported before."""
    import megatron.core  # noqa: F401

    try:
        cpu_backend.install("cpu")
    except RuntimeError as error:
        assert "must run before Megatron is imported" in str(error)
    else:
        raise AssertionError("no error")


def version() -> None:
    """Another version than the tested one."""
    real = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.17.0" if name == "megatron-core" else real(name)
    try:
        cpu_backend.install("cpu")
    except UserError as error:
        assert "tested with 0.16.1 only, found 0.17.0" in str(error)
    else:
        raise AssertionError("no error")


def rng() -> None:
    """A fork draws the same numbers for the same seed and leaves the outer generator alone."""
    cpu_backend.install("cpu")
    import torch
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("a", 5)
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    with tracker.fork("a"):
        first = torch.rand(3)
    assert torch.equal(torch.rand(2), expected)
    with tracker.fork("a"):
        second = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.cat([first, second]), torch.cat([torch.rand(3), torch.rand(3)]))


def engine_import() -> None:
    """SGLang's engine module imports after the patches."""
    cpu_backend.install("cpu")
    import sglang.srt.entrypoints.engine  # noqa: F401


if __name__ == "__main__":
    globals()[sys.argv[1]]()
