"""The CPU backend's promises; that every layout computes right is in test_models.py."""

from __future__ import annotations

import pytest
import torch

from megappo.distributed.cpu_backend import AdamW, install, retarget
from megappo.errors import UserError
from tests.distributed.launch import run_ranks


@pytest.mark.distributed
@pytest.mark.parametrize(
    "check", ["twice", "cuda", "late", "version", "rng", "optimizer", "engine_import"]
)
def test_installing(check):
    run_ranks("cpu_backend.py", 1, check)


def test_an_unknown_device_is_refused():
    with pytest.raises(UserError, match="not 'tpu'"):
        install("tpu")


def test_constants_change_in_nested_code_and_only_there():
    source = """
def f(kind):
    def g():
        return ["cuda", ("torch.cuda.FloatTensor", "cuda:0"), "cuda_graph"]
    return g()
"""
    namespace: dict = {}
    exec(retarget(compile(source, "x", "exec")), namespace)
    assert namespace["f"](0) == ["cpu", ("torch.FloatTensor", "cuda:0"), "cuda_graph"]
    unchanged = compile("x = 'gpu'", "x", "exec")
    assert retarget(unchanged) is unchanged


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_equals_torch_bit_for_bit(weight_decay):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(7, 5, generator=generator)
    settings = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    optimizers = AdamW([ours], **settings), torch.optim.AdamW([theirs], **settings, foreach=False)
    for _ in range(5):
        grad = torch.randn(7, 5, generator=generator)
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = grad.clone()
            optimizer.step()
    assert torch.equal(ours, theirs)


def test_adamw_keeps_its_step_in_the_group_and_moments_alone_in_the_state():
    parameter = torch.ones(3, requires_grad=True)
    idle = torch.ones(2, requires_grad=True)
    optimizer = AdamW([{"params": [parameter, idle]}, {"params": []}])
    parameter.grad = torch.ones(3)
    optimizer.step()
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 2
    assert "step" not in optimizer.param_groups[1]
    assert set(optimizer.state[parameter]) == {"exp_avg", "exp_avg_sq"}
    assert torch.equal(idle, torch.ones(2))


def test_adamw_without_decoupling_adds_decay_to_the_gradient():
    ours, theirs = (torch.full((3,), 2.0, requires_grad=True) for _ in range(2))
    for parameter, optimizer in (
        (ours, AdamW([ours], lr=0.1, weight_decay=0.3, adam_w_mode=False)),
        (theirs, torch.optim.Adam([theirs], lr=0.1, weight_decay=0.3, foreach=False)),
    ):
        parameter.grad = torch.tensor([1.0, -2.0, 0.0])
        optimizer.step()
    assert torch.equal(ours, theirs)
