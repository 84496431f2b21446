"""The critic's head: one number a token in place of logits, float32 even where the model is bf16.

The weight is the same on all tensor-parallel ranks. Without sequence parallelism each of them sees
all tokens and computes the same gradient. With it each sees a share of the tokens: the values are
gathered (S numbers, not S hidden states), and the weight is marked so that Megatron sums its
gradient over the ranks, as it does for norms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class ValueHead(torch.nn.Module):  # type: ignore[misc]
    """Takes the place of a GPTModel's `output_layer`; a linear map to one number, without bias.

    Args:
        config: Read for the hidden size, the dtype and sequence parallelism.
        std: Standard deviation of the initial weight. 0 makes all first values 0, which is
            neutral: advantages are then the rewards alone.
        seed: Of the initial weight, equal on all ranks.
    """

    def __init__(self, config: TransformerConfig, *, std: float, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(1, config.hidden_size, generator=generator) * std
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(weight.to(device=device, dtype=config.params_dtype))
        self.sequence_parallel = config.sequence_parallel
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """Values of all tokens. Collective over the TP group under sequence parallelism.

        Args:
            hidden: [S, B, H], or [S / TP, B, H] under sequence parallelism.
            weight: Must be None; the place of a shared embedding in Megatron's call.
            runtime_gather_output: Ignored; values are always complete on every rank.

        Returns:
            [S, B] float32, and no bias. GPTModel turns it into [B, S].
        """
        assert weight is None, "a value head does not share the embedding"
        values = F.linear(hidden.float(), self.weight.float())[..., 0]
        if self.sequence_parallel:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            # Every rank computes the same loss from the gathered values, so the gradient of each
            # share is taken as it is, not summed over ranks.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
