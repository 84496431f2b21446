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
from typing import Any, Protocol, TypeVar

from megappo.distributed.exchange import exchange_objects
from megappo.distributed.metrics import Tally, reduce_tally
from megappo.distributed.parallel import ParallelContext, all_gather_objects
from megappo.rollout.engine import GenerationRequest, tell_nobody
from megappo.rollout.placement import Placement, deal
from megappo.rollout.recovery import EngineKeeper, WeightSource
from megappo.rollout.sampling import SamplingSettings, sample_seed
from megappo.types import Completion, Prompt, PromptBatch, RolloutBatch, collate

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Route:
    """Whose engine answers which request, seen from one rank of a sharing domain."""

    group: Any
    """of the domain"""
    engines: tuple[int, ...]
    """for each of this rank's requests the place in the domain of the rank that answers it"""
    num_arrived: tuple[int, ...]
    """requests that each rank of the domain sent to this rank's engine"""

    def home(self, values: Sequence[T]) -> list[T]:
        """One value for each request that arrived -> one for each request of this rank.

        Collective over the domain.
        """
        given = iter(values)
        parts = [[next(given) for _ in range(count)] for count in self.num_arrived]
        answers = [iter(part) for part in exchange_objects(parts, self.group)]
        return [next(answers[engine]) for engine in self.engines]


class Listener(Protocol):
    """Follows a generation on the rank whose engine answers, response by response."""

    def expect(self, prompts: Sequence[Prompt]) -> None:
        """This rank's engine is about to answer these (without token ids); there may be none."""

    def finished(self, number: int, completion: Completion) -> None:
        """The answer to prompt `number` of those; from any thread, perhaps more than once."""

    def answered(self, route: Route) -> None:
        """All of them have been told; the way back to the ranks that asked."""


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

    def generate(
        self, batch: PromptBatch, *, step: int, salt: int = 0, listener: Listener | None = None
    ) -> RolloutBatch:
        """`n` samples of each prompt, siblings next to each other. Collective over the world.

        A sample's seed depends on (seed, step, row, sample, salt) alone: not on ranks, order or
        batch.
        """
        pairs = [(prompt, k) for prompt in batch.prompts for k in range(self.n)]
        return self._generate_pairs(pairs, self.sampling, step=step, salt=salt, listener=listener)

    def greedy(
        self, prompts: Sequence[Prompt], *, step: int, listener: Listener | None = None
    ) -> RolloutBatch:
        """The likeliest response to each prompt, by the training's other settings.

        Collective over the world. Ranks of a replica ask for the same prompts.
        """
        sampling = replace(self.sampling, temperature=0.0)
        pairs = [(prompt, 0) for prompt in prompts]
        return self._generate_pairs(pairs, sampling, step=step, listener=listener)

    def _generate_pairs(
        self,
        pairs: Sequence[tuple[Prompt, int]],
        sampling: SamplingSettings,
        *,
        step: int,
        salt: int = 0,
        listener: Listener | None,
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
        answers = self._ask(requests, [prompt for prompt, _ in mine], listener)
        parts = all_gather_objects(answers, self.context.model_group)
        completions: list[Completion] = [c for part in parts for c in part]
        return collate([prompt for prompt, _ in pairs], completions)

    def answer(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingSettings,
        n: int,
        *,
        listener: Listener | None = None,
    ) -> list[Completion]:
        """`n` samples of each of this rank's prompts, for validation; there may be none.

        Collective over the world.
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
        return self._ask(requests, [p for p in prompts for _ in range(n)], listener)

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

    def _ask(
        self,
        requests: Sequence[GenerationRequest],
        prompts: Sequence[Prompt],
        listener: Listener | None,
    ) -> list[Completion]:
        """One completion a request, in order, from the domain's engines. Collective over all."""
        place = self.placement
        lengths = all_gather_objects([len(r.token_ids) for r in requests], place.group)
        dealt = iter(deal([n for of_rank in lengths for n in of_rank], len(place.owners)))
        engines = [[next(dealt) for _ in of_rank] for of_rank in lengths]
        mine = [place.owners[e] for e in engines[place.members.index(place.rank)]]
        # A listener needs the row, and the request has its tokens already.
        rows = [None if listener is None else replace(p, token_ids=()) for p in prompts]
        outgoing: list[list[tuple[GenerationRequest, Prompt | None]]] = [[] for _ in place.members]
        for owner, request, row in zip(mine, requests, rows, strict=True):
            outgoing[owner].append((request, row))
        arrived = exchange_objects(outgoing, place.group)
        route = Route(
            group=place.group,
            engines=tuple(mine),
            num_arrived=tuple(len(part) for part in arrived),
        )
        return route.home(self._generate([a for part in arrived for a in part], route, listener))

    def _generate(
        self,
        arrived: Sequence[tuple[GenerationRequest, Prompt | None]],
        route: Route,
        listener: Listener | None,
    ) -> list[Completion]:
        """This rank's engine on what the ranks of the domain sent it, as one batch."""
        requests = [request for request, _ in arrived]
        if listener is None:
            return self.engine.generate(requests, on_finished=tell_nobody)
        listener.expect([prompt for _, prompt in arrived if prompt is not None])
        completions = self.engine.generate(requests, on_finished=listener.finished)
        # Also those that an engine could not tell of, or that it sampled again.
        for number, completion in enumerate(completions):
            listener.finished(number, completion)
        listener.answered(route)
        return completions
