"""What a model learns from given answers: to score the better one higher, or to say the one.

An objective is the last stage's output of one micro-batch -> a loss sum with its count and metrics,
so that training and validation share it. Each sample is an answer with its prompt; those of a row
follow one another in a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from megappo.distributed.context_parallel import join_over_context
from megappo.distributed.metrics import Tally
from megappo.distributed.parallel import tensor_parallel_group
from megappo.distributed.pipeline import LossSum
from megappo.distributed.vocab_parallel import log_probs_and_entropy
from megappo.models.name_map import Head
from megappo.ppo.masking import masked_sum
from megappo.ppo.preference import bradley_terry
from megappo.roles.base import Network
from megappo.roles.micro_batch import MicroBatch
from megappo.types import RolloutBatch


class Objective(Protocol):
    """A loss over given answers."""

    name: ClassVar[str]
    """Before the slash of its metrics; also names the model in messages and checkpoints."""
    head: ClassVar[Head]
    answers: ClassVar[int]
    """Samples of a row, which stay in one micro-batch."""
    metrics: ClassVar[tuple[str, ...]]
    """Means that `loss` adds, without the name; `loss` is the first."""

    def loss(self, output: Tensor, micro: MicroBatch, network: Network) -> LossSum:
        """Loss sum of one micro-batch. Collective over the TP and CP groups of the last stage."""

    def count(self, samples: RolloutBatch) -> float:
        """What whole samples add to the loss's denominator."""


@dataclass(frozen=True, kw_only=True)
class PairPreference:
    """Bradley-Terry: scores are values at the last token, see `ppo.preference`."""

    center_coef: float

    name: ClassVar[str] = "rm"
    head: ClassVar[Head] = "value"
    answers: ClassVar[int] = 2
    metrics: ClassVar[tuple[str, ...]] = (
        "loss",
        "accuracy",
        "margin",
        "chosen_score",
        "rejected_score",
    )

    def loss(self, output: Tensor, micro: MicroBatch, network: Network) -> LossSum:
        """Summed over pairs; scores of a pair may lie on different context-parallel ranks."""
        scores = join_over_context(micro.after_last(output))
        chosen, rejected = scores[0::2], scores[1::2]
        margins = [p.extra_info["margin"] for p in micro.samples.prompts[0::2]]
        losses = bradley_terry(
            chosen,
            rejected,
            margins=torch.tensor(margins, dtype=torch.float32, device=scores.device),
            center_coef=self.center_coef,
        )
        once = network.context.cp_rank == 0
        count = len(margins) if once else 0
        lead = (chosen - rejected).detach()
        figures = (losses.detach(), (lead > 0).float(), lead, chosen.detach(), rejected.detach())
        tally = Tally()
        for name, values in zip(self.metrics, figures, strict=True):
            tally.add(f"{self.name}/{name}", values.sum().item() if once else 0.0, count)
        return LossSum(
            total=losses.sum(),
            denominator=torch.tensor(count, device=scores.device),
            tally=tally,
        )

    def count(self, samples: RolloutBatch) -> float:
        """Pairs."""
        return len(samples) / 2


@dataclass(frozen=True, kw_only=True)
class AnswerLikelihood:
    """Cross-entropy of the answers' tokens, nats; prompts are read and not learnt."""

    name: ClassVar[str] = "sft"
    head: ClassVar[Head] = "lm"
    answers: ClassVar[int] = 1
    metrics: ClassVar[tuple[str, ...]] = ("loss",)

    def loss(self, output: Tensor, micro: MicroBatch, network: Network) -> LossSum:
        """Summed over the answers' tokens."""
        log_probs, _ = log_probs_and_entropy(
            output,
            micro.packed.labels,
            tp_group=tensor_parallel_group(),
            vocab_size=network.spec.vocab_size,
            temperature=1.0,
            with_entropy=False,
        )
        mask = micro.owned_mask.to(output.device)
        total = masked_sum(-micro.to_responses(log_probs), mask)
        denominator = network.denominator(micro.samples.response_mask, "token-mean")
        tally = Tally()
        tally.add(f"{self.name}/loss", total.item(), denominator.item())
        return LossSum(total=total, denominator=denominator, tally=tally)

    def count(self, samples: RolloutBatch) -> float:
        """Tokens of answers."""
        return float(samples.response_mask.sum())
