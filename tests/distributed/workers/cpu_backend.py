"""What `install` promises, checked in a fresh process; the first argument names the check."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

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

    with pytest.raises(RuntimeError, match="must run before Megatron is imported"):
        cpu_backend.install("cpu")


def version() -> None:
    """Another version than the tested one: its metadata comes first on the path."""
    with tempfile.TemporaryDirectory() as folder:
        metadata = Path(folder) / "megatron_core-0.17.0.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.17.0\n")
        sys.path.insert(0, folder)
        with pytest.raises(UserError, match=r"tested with 0\.16\.1 only, found 0\.17\.0"):
            cpu_backend.install("cpu")


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


def optimizer() -> None:
    """The distributed optimizer's state can be taken before the first step, and put back."""
    cpu_backend.install("cpu")
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    model = torch.nn.Linear(8, 4)
    model.config = config
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
    )
    settings = OptimizerConfig(optimizer="adam", lr=0.1, use_distributed_optimizer=True)
    megatron = get_megatron_optimizer(settings, [ddp])
    megatron.state_dict()
    for _ in range(2):
        ddp.zero_grad_buffer()
        ddp(torch.ones(2, 8)).square().sum().backward()
        ddp.finish_grad_sync()
        done, norm, _ = megatron.step()
        assert done
        assert norm > 0
    saved = megatron.state_dict()
    assert {g["step"] for g in saved["optimizer"]["param_groups"]} == {2}
    megatron.load_state_dict(saved)
    dist.destroy_process_group()


def engine_import() -> None:
    """SGLang's engine module imports after the patches."""
    cpu_backend.install("cpu")
    import sglang.srt.entrypoints.engine  # noqa: F401


if __name__ == "__main__":
    globals()[sys.argv[1]]()
