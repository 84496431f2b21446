"""The data that flows through a step.

Legend: B samples on this rank, T longest response of the batch.

A *prompt* is one row of the data; a *sample* is one response to it, so B = prompts x `rollout.n`.
Every field of `RolloutBatch` has B entries, sample b of each belongs together, and `select` moves
all of them with one permutation. Response tensors are right-padded; only `response_mask` says what
counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One rendered row of the data."""

    row: int
    """Row number over all files of the set, in file order: stable, so sampling seeds may use it."""
    token_ids: tuple[int, ...]
    """The rendered chat template with its generation prompt: exactly what the engine is given."""
    data_source: str
    ground_truth: str
    extra_info: dict[str, Any]
    """Every other column of the row, as plain Python values."""


@dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """This rank's prompts of one step, in the global order of the step."""

    epoch: int
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One response as the engine reported it; `text` is for people and rewards only."""

    token_ids: tuple[int, ...]
    """Sampled ids, the end token included where the model produced one."""
    log_probs: tuple[float, ...]
    """Log-probability of each id under softmax(logits / temperature), nats."""
    finish_reason: str
    """`stop` (end token or stop string) or `length` (cut at the limit)."""
    text: str

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.log_probs):
            raise RuntimeError(
                f"the engine returned {len(self.token_ids)} token ids and {len(self.log_probs)} "
                "log-probs for one response; they must be as many"
            )


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """Samples of one step on one rank; later stages fill the optional fields."""

    prompts: tuple[Prompt, ...]
    """[B] the prompt of each sample (repeated for its siblings)."""
    completions: tuple[Completion, ...]
    """[B]"""
    responses: Tensor
    """[B, T] int64 token ids, 0 where padded."""
    response_mask: Tensor
    """[B, T] bool, True on trained response tokens."""
    rollout_log_probs: Tensor
    """[B, T] float32, by the engine."""
    scores: Tensor | None = None
    """[B] float32, what the reward gave."""
    unscored: Tensor | None = None
    """[B] bool, True where a reward failed: the score is no judgement, and no token is trained."""
    baselines: Tensor | None = None
    """[B] float32, score of the greedy response to the sample's prompt."""
    old_log_probs: Tensor | None = None
    """[B, T] float32, by the actor before the update."""
    rollout_is_weights: Tensor | None = None
    """[B, T] float32, factor of each token's policy loss against the engine-trainer gap."""
    ref_log_probs: Tensor | None = None
    """[B, T] float32, by the reference."""
    values: Tensor | None = None
    """[B, T] float32, by the critic before the update."""
    rewards: Tensor | None = None
    """[B, T] float32, after KL and placement on tokens."""
    advantages: Tensor | None = None
    """[B, T] float32"""
    returns: Tensor | None = None
    """[B, T] float32"""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def is_scored(self) -> Tensor:
        """[B] bool, the samples whose score is one."""
        none = torch.zeros(len(self), dtype=torch.bool)
        return ~(none if self.unscored is None else self.unscored)

    @property
    def response_lengths(self) -> list[int]:
        """Tokens of each response, trained or not."""
        return [len(c.token_ids) for c in self.completions]

    @property
    def total_lengths(self) -> list[int]:
        """Prompt and response tokens of each sample."""
        return [
            len(p.token_ids) + len(c.token_ids)
            for p, c in zip(self.prompts, self.completions, strict=True)
        ]

    def with_fields(self, **new: Tensor) -> RolloutBatch:
        """A copy with some fields filled."""
        return replace(self, **new)

    def with_scores(self, scores: Tensor, unscored: Tensor) -> RolloutBatch:
        """A copy with scores ([B]), and without a trained token where `unscored` ([B] bool)."""
        mask = self.response_mask & ~unscored[:, None]
        return replace(self, scores=scores, unscored=unscored, response_mask=mask)

    def select(self, samples: Sequence[int]) -> RolloutBatch:
        """The given samples in the given order, every field moved alike."""
        index = torch.as_tensor(samples, dtype=torch.long)
        moved: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                moved[f.name] = value[index]
            elif isinstance(value, tuple):
                moved[f.name] = tuple(value[i] for i in samples)
        return replace(self, **moved)


def collate(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> RolloutBatch:
    """Pads completions on the right to [B, T]; masks come from lengths, never from token values."""
    width = max((len(c.token_ids) for c in completions), default=0)
    shape = (len(completions), width)
    responses = torch.zeros(shape, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.bool)
    log_probs = torch.zeros(shape, dtype=torch.float32)
    for b, completion in enumerate(completions):
        n = len(completion.token_ids)
        responses[b, :n] = torch.tensor(completion.token_ids, dtype=torch.long)
        log_probs[b, :n] = torch.tensor(completion.log_probs, dtype=torch.float32)
        mask[b, :n] = True
    return RolloutBatch(
        prompts=tuple(prompts),
        completions=tuple(completions),
        responses=responses,
        response_mask=mask,
        rollout_log_probs=log_probs,
    )


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """The samples of one optimizer step on this rank, already split for forward passes."""

    samples: RolloutBatch
    micro_batches: tuple[tuple[int, ...], ...]
    """Indices into `samples`, one tuple a forward pass; every rank has equally many."""
