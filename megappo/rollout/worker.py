"""Shares prompts out over engines and puts the answers together again.

All ranks of a replica train on the same samples, but each generates only its part of them: sample b
goes to one rank, and the parts are gathered inside the replica in the order of b. Token ids travel,
text is only carried along for rewards and people.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megappo.distributed.parallel import ParallelContext, all_gather_objects
from megappo.rollout.engine import GenerationRequest, SyncReport
from megappo.rollout.recovery import EngineKeeper, WeightSource
from megappo.rollout.sampling import SamplingSettings, sample_seed
from megappo.types import Completion, Prompt, PromptBatch, RolloutBatch, collate


@dataclass(kw_only=True)
class RolloutWorker:
    """One engine a rank; a failed one is replaced on the way, and nobody here notices."""

    engine: EngineKeeper
    context: ParallelContext
    seed: int
    n: int
    sampling: SamplingSettings
    sleeps: bool
    """Whether engines give their device memory back while the trainer works."""

    def generate(self, batch: PromptBatch, *, step: int) -> RolloutBatch:
        """`n` samples of each prompt, siblings next to each other. Collective over the world.

        A sample's seed depends on (seed, step, row, sample) alone: not on ranks, order or batch.
        """
        pairs = [(prompt, k) for prompt in batch.prompts for k in range(self.n)]
        mine = [pairs[b] for b in self.my_part(len(pairs))]
        requests = [
            GenerationRequest(
                token_ids=prompt.token_ids,
                seed=sample_seed(self.seed, step=step, row=prompt.row, sample=k),
                sampling=self.sampling,
            )
            for prompt, k in mine
        ]
        parts = all_gather_objects(self.engine.generate(requests), self.context.model_group)
        completions: list[Completion] = [c for part in parts for c in part]
        return collate([prompt for prompt, _ in pairs], completions)

    def answer(
        self, prompts: Sequence[Prompt], sampling: SamplingSettings, n: int
    ) -> list[Completion]:
        """`n` samples of each prompt by this rank's engine, for validation.

        Collective over the world: a rank without prompts calls it with none.
        """
        requests = [
            GenerationRequest(
                token_ids=prompt.token_ids,
                seed=sample_seed(self.seed, step=0, row=prompt.row, sample=k),
                sampling=sampling,
            )
            for prompt in prompts
            for k in range(n)
        ]
        return self.engine.generate(requests)

    def my_part(self, count: int) -> range:
        """Indices of the samples that this rank handles out of `count` of its replica."""
        size, rank = self.context.model_size, self.context.model_rank
        return range(count * rank // size, count * (rank + 1) // size)

    def sleep(self) -> int:
        """Device bytes that this rank's engine gives the trainer until the next push."""
        return self.engine.sleep() if self.sleeps else 0

    def push(self, source: WeightSource, *, version: int) -> SyncReport | None:
        """New weights, in Hugging Face names, for engines that then are awake.

        Collective over the world. Every later response must report `version`; `EngineKeeper.push`
        says when there is no report.
        """
        return self.engine.push(source, version=version)
