"""Megatron's files load without code of theirs, whatever was registered as safe before."""

from __future__ import annotations

import numpy as np
import torch
from torch.serialization import get_safe_globals, safe_globals

from megappo.checkpoint.convert.safe_load import safe_load


def test_a_random_state_loads_after_megatron_registered_the_classes_of_numpy(tmp_path):
    """As megatron-core 0.16.1 does on import; torch cannot build the real dtype of the array."""
    path = tmp_path / "rank.pt"
    torch.save({"weight": torch.ones(2), "rng": np.random.RandomState(0).get_state()}, path)
    theirs = [np.dtype, np.ndarray, np._core.multiarray._reconstruct]
    with safe_globals(theirs):
        before = get_safe_globals()
        assert torch.equal(safe_load(path)["weight"], torch.ones(2))
        assert set(get_safe_globals()) == set(before)
