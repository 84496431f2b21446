"""The frozen reward model: one score a sample, the value at its last token.

That is what transformers' sequence classifiers with one label give, and what `megappo train-rm`
trains. It reads the token ids that were sampled; a response that was cut at its limit is scored as
it stands, without an end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.distributed.offload import Offloader, on_device
from megappo.roles.base import Network
from megappo.roles.micro_batch import MicroBatch
from megappo.types import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    """A model with a scalar head on its last pipeline stage."""

    network: Network
    memory: Offloader
    """Moves the weights between device and host."""

    def score(self, batch: RolloutBatch, micro_batches: Sequence[Sequence[int]]) -> Tensor:
        """Scores of whole samples, [B] float32 on the CPU. Collective over the replica.

        A model with experts asks more: equally many passes on all DP ranks.

        Args:
            batch: [B] samples.
            micro_batches: rows of each forward pass; all of them must occur.
        """

        def finish(values: Tensor, micro: MicroBatch) -> list[Tensor]:
            width = micro.samples.responses.shape[1]
            return [micro.after_last(values)[:, None].expand(-1, width)]

        with on_device(self.memory, "params"):
            (scores,) = self.network.fill(
                self.network.chunks, batch, micro_batches, finish, num_outputs=1
            )
        return scores[:, 0] if scores.shape[1] else torch.zeros(len(batch))
