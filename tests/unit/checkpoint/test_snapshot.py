"""Copies themselves are in tests/distributed/test_guard.py and test_lora.py, over ranks."""

from types import SimpleNamespace

import torch

from megappo.checkpoint.snapshot import trained_contents
from megappo.distributed.offload import Offloader


def test_frozen_weights_are_not_copied_wherever_they_are():
    module = torch.nn.Linear(3, 5)
    module.weight.requires_grad_(False)
    memory = Offloader("m", [module], parts=("params",))
    model = SimpleNamespace(chunks=[SimpleNamespace(module=module)], memory=memory)

    def sizes():
        return [
            [p.numel() for p in pieces] for pieces in trained_contents(model, "params").values()
        ]

    assert sizes() == [[5 * 4]]
    memory.offload()
    assert sizes() == [[5 * 4]]
    module.weight.requires_grad_(True)
    assert sorted(sizes()) == [[5 * 4], [15 * 4]]
