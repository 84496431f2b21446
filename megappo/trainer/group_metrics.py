"""What groups of siblings and sources of data look like, before samples are dealt out over ranks.

Afterwards siblings may lie on several ranks, and samples no longer carry their data source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megappo.distributed.metrics import Tally
from megappo.types import RolloutBatch

DIVERSITY = "rollout/group_diversity"
ZERO_VARIANCE = "rollout/zero_variance_groups"


@dataclass(frozen=True, kw_only=True)
class GroupMetrics:
    """Figures of a step's groups and sources; nothing here communicates."""

    n: int = 1
    """responses a prompt; the groups of one have no figures"""
    sources: Sequence[str] = ()
    """every data_source that may occur"""
    reports: bool = True
    """True on exactly one rank of each replica"""

    @property
    def means(self) -> list[str]:
        """Metrics that `add` adds to."""
        of_groups = [DIVERSITY, ZERO_VARIANCE] if self.n > 1 else []
        return of_groups + [by_source(source) for source in self.sources]

    def add(self, batch: RolloutBatch, tally: Tally) -> None:
        """Adds this rank's samples, siblings next to each other and scored.

        `rollout/group_diversity` is the share of different responses (by token ids) in a group,
        `rollout/zero_variance_groups` the share of groups whose scores are all equal, which teach
        an estimator that compares siblings nothing. Samples without a trained token (cut, and
        masked for it, or failed by their reward) are no members of their group, here as there.
        """
        if not self.reports:
            return
        assert batch.scores is not None
        scores, scored = batch.scores.tolist(), batch.is_scored.tolist()
        for prompt, score, counts in zip(batch.prompts, scores, scored, strict=True):
            tally.add(by_source(prompt.data_source), score if counts else 0.0, counts)
        if self.n == 1:
            return
        counted = batch.response_mask.any(dim=-1).tolist()
        for start in range(0, len(batch), self.n):
            members = [i for i in range(start, start + self.n) if counted[i]]
            responses = {batch.completions[i].token_ids for i in members}
            tally.add(DIVERSITY, len(responses) / max(1, len(members)), bool(members))
            tally.add(ZERO_VARIANCE, len({scores[i] for i in members}) <= 1, 1)


def by_source(source: str) -> str:
    """Mean score of a data source in training, as `val/<source>/score/mean` in validation."""
    return f"train/{source}/score/mean"
