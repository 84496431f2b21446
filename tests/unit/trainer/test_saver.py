"""Saves themselves are in tests/distributed/test_saving.py, over ranks."""

import torch

from megappo.trainer.saver import saved_bytes


def test_a_copy_for_a_checkpoint_holds_what_is_trained_alone():
    whole = torch.nn.Linear(3, 5)
    adapted = torch.nn.Linear(3, 5, dtype=torch.bfloat16)
    assert saved_bytes([whole, adapted]) == 20 * (12 + 4) + 20 * (12 + 2)
    adapted.weight.requires_grad_(False)
    assert saved_bytes([whole, adapted]) == 20 * (12 + 4) + 5 * (12 + 2)
