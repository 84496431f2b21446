"""Shares prompts out over engines and puts the answers together again.

All ranks of a replica train on the same samples, and each of them asks for its part: sample b
belongs to one rank, which also scores it. What the ranks of a sharing domain (see `placement`) ask
for is dealt out evenly over the domain's engines; each answer goes back to the rank that asked, and
the parts are gathered inside the replica in the order of b. Token ids travel, text is only carried
along for rewards and people.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megappo.distributed.exchange import exchange_objects
from megappo.distributed.metrics import Tally, reduce_tally
from megappo.distributed.parallel import ParallelContext, all_gather_objects
from megappo.rollout.engine import GenerationRequest
from megappo.rollout.placement import Placement, deal
from megappo.rollout.recovery import EngineKeeper, WeightSource
from megappo.rollout.sampling import SamplingSettings, sample_seed
from megappo.types import Completion, Prompt, PromptBatch, RolloutBatch, collate


@dataclass(kw_only=True)
class RolloutWorker:
    """One rank's access to the engines; a failed one is replaced, and nobody here notices."""

    engine: EngineKeeper
    placement: Placement
    context: ParallelContext
    seed: int
    n: int
    sampling: SamplingSettings
    sleeps: bool
    """Whether engines give their device memory back while the trainer works."""

    @property
    def weight_version(self) -> int:
        """Of the last push; 0 are the folder's weights."""
        return self.engine.weight_version

    def generate(self, batch: PromptBatch, *, step: int, salt: int = 0) -> RolloutBatch:
        """`n` samples of each prompt, siblings next to each other. Collective over the world.

        A sample's seed depends on (seed, step, row, sample, salt) alone: not on ranks, order or
        batch.
        """
        pairs = [(prompt, k) for prompt in batch.prompts for k in range(self.n)]
        return self._generate_pairs(pairs, self.sampling, step=step, salt=salt)

    def greedy(self, prompts: Sequence[Prompt], *, step: int) -> RolloutBatch:
        """The likeliest response to each prompt, by the training's other settings.

        Collective over the world. Ranks of a replica ask for the same prompts.
        """
        sampling = replace(self.sampling, temperature=0.0)
        return self._generate_pairs([(prompt, 0) for prompt in prompts], sampling, step=step)

    def _generate_pairs(
        self,
        pairs: Sequence[tuple[Prompt, int]],
        sampling: SamplingSettings,
        *,
        step: int,
        salt: int = 0,
    ) -> RolloutBatch:
        """One response to each (prompt, number of the sample), gathered inside the replica."""
        mine = [pairs[b] for b in self.my_part(len(pairs))]
        requests = [
            GenerationRequest(
                token_ids=prompt.token_ids,
                seed=sample_seed(self.seed, step=step, row=prompt.row, sample=k, salt=salt),
                sampling=sampling,
            )
            for prompt, k in mine
        ]
        parts = all_gather_objects(self._ask(requests), self.context.model_group)
        completions: list[Completion] = [c for part in parts for c in part]
        return collate([prompt for prompt, _ in pairs], completions)

    def answer(
        self, prompts: Sequence[Prompt], sampling: SamplingSettings, n: int
    ) -> list[Completion]:
        """`n` samples of each of this rank's prompts, for validation; there may be none.

        Collective over the world.
        """
        return self._ask(
            [
                GenerationRequest(
                    token_ids=prompt.token_ids,
                    seed=sample_seed(self.seed, step=0, row=prompt.row, sample=k),
                    sampling=sampling,
                )
                for prompt in prompts
                for k in range(n)
            ]
        )

    def my_part(self, count: int) -> range:
        """Indices of the samples that this rank handles out of `count` of its replica."""
        size, rank = self.context.model_size, self.context.model_rank
        return range(count * rank // size, count * (rank + 1) // size)

    def sleep(self) -> int:
        """Device bytes that this rank's engine gives the trainer until the next push."""
        return self.engine.sleep() if self.sleeps else 0

    def push(self, source: WeightSource, *, version: int) -> Mapping[str, float]:
        """New weights, in Hugging Face names, for engines that then are awake.

        Collective over the world. Every later response must report `version`; `EngineKeeper.push`
        says what happens to an engine that cannot.

        Returns:
            `rollout/sync_seconds`, `rollout/sync_gb` and `rollout/sync_verified` (time, size and
            names compared of a push to one engine; the largest over all ranks).
        """
        report = self.engine.push(source, version=version)
        tally = Tally()
        tally.declare(maxima=("rollout/sync_seconds", "rollout/sync_gb", "rollout/sync_verified"))
        if report is not None:
            tally.add_max("rollout/sync_seconds", report.seconds)
            tally.add_max("rollout/sync_gb", report.num_bytes / 1e9)
            tally.add_max("rollout/sync_verified", report.num_verified)
        return reduce_tally(tally, self.context)

    def close(self) -> None:
        """Ends this rank's engine, if it has one; may be called twice."""
        self.engine.shutdown()

    def _ask(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """One completion a request, in order, from the domain's engines. Collective over all."""
        place = self.placement
        lengths = all_gather_objects([len(r.token_ids) for r in requests], place.group)
        dealt = iter(deal([n for of_rank in lengths for n in of_rank], len(place.owners)))
        engines = [[next(dealt) for _ in of_rank] for of_rank in lengths]
        mine = [place.owners[e] for e in engines[place.members.index(place.rank)]]
        outgoing: list[list[GenerationRequest]] = [[] for _ in place.members]
        for owner, request in zip(mine, requests, strict=True):
            outgoing[owner].append(request)
        arrived = exchange_objects(outgoing, place.group)
        returned = exchange_objects(self._generate(arrived), place.group)
        answers = [iter(part) for part in returned]
        return [next(answers[owner]) for owner in mine]

    def _generate(self, arrived: Sequence[Sequence[GenerationRequest]]) -> list[list[Completion]]:
        """This rank's engine on what each rank of the domain sent it, as one batch."""
        completions = iter(self.engine.generate([r for part in arrived for r in part]))
        return [[next(completions) for _ in part] for part in arrived]
