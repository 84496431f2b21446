"""Dynamic sampling: groups of equal scores are left out, and more prompts drawn in their place.

Yu 2025 (DAPO, arXiv 2503.14476, section 3.2). A round draws a whole batch of prompts. Every rank
knows which group of the whole batch is kept, in the order in which prompts were drawn, so the
step's samples are the same in every layout; they are then dealt out as a drawn batch is. Rounds are
bounded: if the last leaves too few, groups of equal scores fill the batch, which teach nothing.
Left out: keeping what was drawn too much for the next step; it would be a step older.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megappo.data.sampler import rank_share
from megappo.distributed.exchange import exchange_objects, gather_equal
from megappo.trainer.collect import DrawnSource, StepScope
from megappo.types import Completion, Prompt, RolloutBatch, collate

ROUNDS = "sampling/rounds"
KEPT = "sampling/kept_share"
FILLED = "sampling/filled_share"

SALT_STRIDE = 1 << 20
"""Between rounds: a row that comes again, in the next epoch, is answered anew."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The responses to one prompt, as every rank knows of them."""

    row: int
    owner: int
    """DP rank that holds them"""
    place: int
    """among the groups that the owner holds"""


@dataclass(frozen=True, kw_only=True)
class Held:
    """The same, where it is."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    scores: tuple[float, ...]
    unscored: tuple[bool, ...]
    """of which a reward failed"""


@dataclass(frozen=True, kw_only=True)
class DynamicSource:
    """Draws until a step's worth of groups has scores that differ, or rounds are used up."""

    drawn: DrawnSource
    n: int
    max_rounds: int
    ignores_cut: bool
    """Responses cut at their length limit do not count, as they will be masked."""

    @property
    def means(self) -> Sequence[str]:
        """See `Source`."""
        return (*self.drawn.means, ROUNDS, KEPT, FILLED)

    def collect(self, scope: StepScope) -> RolloutBatch:
        """See `Source`. Collective over the world."""
        wanted = self.drawn.sampler.batch_size
        held: list[Held] = []
        kept: dict[int, Group] = {}
        spare: dict[int, Group] = {}
        num_drawn = num_informative = num_rounds = 0
        while num_rounds < self.max_rounds and len(kept) < wanted:
            epoch, rows = self.drawn.sampler.next_batch()
            salt = scope.salt + num_rounds * SALT_STRIDE
            batch = self.drawn.answer(epoch, rows, scope, salt=salt)
            for group, differs in self._look(rows, batch, offset=len(held)):
                num_informative += differs
                if differs and group.row not in kept:
                    kept[group.row] = group
                    spare.pop(group.row, None)
                elif not differs and group.row not in kept:
                    spare.setdefault(group.row, group)
            held += _held(batch, self.n)
            num_drawn += len(rows)
            num_rounds += 1
        chosen = [*kept.values(), *spare.values()][:wanted]
        scope.tally.add(ROUNDS, num_rounds, 1)
        scope.tally.add(KEPT, num_informative, num_drawn)
        scope.tally.add(FILLED, max(0, wanted - len(kept)), wanted)
        return self._deal(chosen, held)

    def _look(
        self, rows: Sequence[int], batch: RolloutBatch, *, offset: int
    ) -> list[tuple[Group, bool]]:
        """Each group of the whole batch in order, and whether its scores differ.

        Collective over DP.
        """
        differs = torch.tensor([self._differs(group) for group in _held(batch, self.n)])
        everyone = gather_equal(differs, self.drawn.context.data_group)
        place = {
            row: (owner, place)
            for owner in range(self.drawn.context.dp)
            for place, row in enumerate(self._share(rows, owner))
        }
        found = []
        for row in rows:
            owner, number = place[row]
            group = Group(row=row, owner=owner, place=offset + number)
            found.append((group, bool(everyone[owner, number])))
        return found

    def _differs(self, group: Held) -> bool:
        counted = {
            score
            for score, failed, completion in zip(
                group.scores, group.unscored, group.completions, strict=True
            )
            if not (failed or (self.ignores_cut and completion.finish_reason == "length"))
        }
        return len(counted) > 1

    def _share(self, items: Sequence[int], dp_rank: int) -> list[int]:
        return rank_share(
            items,
            mini_batch_size=self.drawn.mini_batch_prompts,
            dp_rank=dp_rank,
            dp_size=self.drawn.context.dp,
        )

    def _deal(self, chosen: Sequence[Group], held: Sequence[Held]) -> RolloutBatch:
        """Sends each chosen group to the rank that trains on it. Collective over DP."""
        context = self.drawn.context
        outgoing: list[list[tuple[int, Held]]] = [[] for _ in range(context.dp)]
        for destination in range(context.dp):
            for number in self._share(range(len(chosen)), destination):
                if chosen[number].owner == context.dp_rank:
                    outgoing[destination].append((number, held[chosen[number].place]))
        arrived = exchange_objects(outgoing, context.data_group)
        mine = dict(pair for part in arrived for pair in part)
        groups = [mine[number] for number in self._share(range(len(chosen)), context.dp_rank)]
        batch = collate(
            [group.prompt for group in groups for _ in group.completions],
            [completion for group in groups for completion in group.completions],
        )
        return batch.with_scores(
            torch.tensor([score for group in groups for score in group.scores]),
            torch.tensor([failed for group in groups for failed in group.unscored]),
        )


def _held(batch: RolloutBatch, n: int) -> list[Held]:
    """The groups of a batch with siblings next to each other."""
    assert batch.scores is not None
    scores, failed = batch.scores.tolist(), (~batch.is_scored).tolist()
    return [
        Held(
            prompt=batch.prompts[start],
            completions=batch.completions[start : start + n],
            scores=tuple(scores[start : start + n]),
            unscored=tuple(failed[start : start + n]),
        )
        for start in range(0, len(batch), n)
    ]
