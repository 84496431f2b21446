"""What adapters refuse. Their numbers are in tests/distributed/test_lora.py."""

from types import SimpleNamespace

import pytest
import torch

from megappo.config.lora import LoraSection
from megappo.errors import ModelError
from megappo.models.lora import Adapter


@pytest.mark.parametrize(
    ("norm", "zero_centered", "told"),
    [
        (
            "LayerNorm",
            False,
            "not normalization LayerNorm with layernorm_zero_centered",
        ),
        ("RMSNorm", True, "RMSNorm with layernorm_zero_centered_gamma=True"),
    ],
)
def test_a_layer_with_another_norm_in_it_gets_no_adapter(norm, zero_centered, told):
    linear = torch.nn.Linear(4, 4)
    linear.layer_norm_weight = torch.nn.Parameter(torch.ones(4))
    linear.config = SimpleNamespace(
        normalization=norm, layernorm_zero_centered_gamma=zero_centered, layernorm_epsilon=1e-6
    )
    with pytest.raises(ModelError, match=told):
        Adapter(linear, LoraSection(rank=2), by_outputs=True, seed=0)
