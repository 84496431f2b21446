import json
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megappo.models.spec import spec_from_config
from megappo.planner.constants import GPUS, gpu_of_device
from megappo.planner.flops import forward_flops, mfu, train_flops, train_flops_per_token

CONFIG = LlamaConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
SPEC = spec_from_config(json.loads(CONFIG.to_json_string(use_diff=False)))


def test_products_are_those_that_torch_counts():
    """An independent count: torch's own, of a real Llama; its attention counts the full square."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(CONFIG, attn_implementation="eager")
        tokens = torch.zeros(1, 20, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens)
    full_square, causal = 20 * 20, 20 * 21 // 2
    pairs = 3 * 2 * 2 * 32
    expected = counter.get_total_flops() - pairs * (full_square - causal)
    assert forward_flops(SPEC, [20]) == expected


def test_training_is_three_forward_passes_and_a_critic_has_no_vocabulary():
    assert train_flops(SPEC, [7, 9]) == 3 * (forward_flops(SPEC, [7]) + forward_flops(SPEC, [9]))
    assert train_flops_per_token(SPEC, 9) * 9 == pytest.approx(train_flops(SPEC, [9]), rel=1e-12)
    gap = forward_flops(SPEC, [7]) - forward_flops(SPEC, [7], head="value")
    assert gap == 7 * 2 * 32 * 48


def test_mfu_of_a_hand_computed_step():
    assert mfu(8e12, seconds=2, num_devices=4, peak_flops_per_s=4e12) == 0.25
    assert mfu(8e12, seconds=0, num_devices=4, peak_flops_per_s=4e12) == 0


def test_devices_are_found_by_the_drivers_names():
    assert gpu_of_device("NVIDIA H100 80GB HBM3") is GPUS["h100-80gb"]
    assert gpu_of_device("NVIDIA A100-SXM4-40GB") is GPUS["a100-40gb"]
    assert gpu_of_device("NVIDIA H100 PCIe") is None
    assert gpu_of_device("Tesla T4") is None
    for gpu in GPUS.values():
        assert math.isfinite(gpu.flops_per_s)
        # Operations a byte of memory traffic: a figure of another unit would stand out.
        assert 100 < gpu.flops_per_s / gpu.memory_bytes_per_s < 500
