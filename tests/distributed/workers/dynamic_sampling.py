"""A source whose answers are made up from the row and the salt, for dynamic sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from megappo.data.curriculum import CurriculumSampler, Preference
from megappo.data.sampler import PromptSampler, rank_share
from megappo.distributed.metrics import Tally, reduce_tally
from megappo.distributed.parallel import ParallelContext
from megappo.trainer.collect import DrawnSource, StepScope
from megappo.trainer.dynamic_sampling import SALT_STRIDE, DynamicSource
from megappo.trainer.stopwatch import Stopwatch
from megappo.types import Completion, Prompt, RolloutBatch, collate

N, BATCH, MINI = 2, 8, 4
CASES = {"enough": (24, 3), "bounded": (24, 1), "again": (8, 4), "failing": (72, 9)}
"""name -> rows of the data, most rounds"""
FAILING_ROWS = 72


def scores_of(row: int, round_number: int, num_rows: int) -> tuple[float, float]:
    """Equal but for one row in three; with few rows, in later rounds for others of them."""
    differs = (row + round_number) % 3 == 1 if num_rows == BATCH else row % 3 == 1
    return (1.0, 0.0) if differs else (float(row % 2),) * 2


def failed_of(row: int, num_rows: int) -> tuple[bool, bool]:
    """Where rewards fail: of every ninth row, and one of those whose scores differ."""
    return False, num_rows == FAILING_ROWS and row % 9 == 4


@dataclass(kw_only=True)
class MadeUp:
    """Stands where `DrawnSource` does."""

    context: ParallelContext
    sampler: PromptSampler
    mini_batch_prompts: int = MINI
    means: Sequence[str] = ()

    def answer(
        self, epoch: int, rows: Sequence[int], scope: StepScope, *, salt: int
    ) -> RolloutBatch:
        round_number = (salt - scope.salt) // SALT_STRIDE
        mine = rank_share(
            rows,
            mini_batch_size=MINI,
            dp_rank=self.context.dp_rank,
            dp_size=self.context.dp,
        )
        prompts, completions, scores, failed = [], [], [], []
        for row in mine:
            for k, score in enumerate(scores_of(row, round_number, self.sampler.num_rows)):
                prompts.append(
                    Prompt(
                        row=row,
                        token_ids=(row, row),
                        data_source=f"source {row}",
                        ground_truth="",
                        extra_info={},
                    )
                )
                ids = (row, round_number, k)[: 1 + (row + k) % 3]
                completions.append(
                    Completion(
                        token_ids=ids,
                        log_probs=(-1.0 - k,) * len(ids),
                        finish_reason="stop",
                        text=f"{row} {round_number} {k}",
                    )
                )
                scores.append(score)
                failed.append(failed_of(row, self.sampler.num_rows)[k])
        batch = collate(prompts, completions)
        return batch.with_scores(torch.tensor(scores), torch.tensor(failed))


def curriculum() -> CurriculumSampler:
    preference = Preference(target=0.5, width=0.5, floor=0.1, smoothing=0.5)
    return CurriculumSampler(24, batch_size=BATCH, seed=3, shuffle=True, preference=preference)


def source_of(row: int) -> str:
    return "third" if row % 3 == 0 else "other"


def collect_with_scores(context: ParallelContext) -> dict[str, Any]:
    """Batches that `DrawnSource` draws by scores, which the responses say; no engine answers."""

    def prompts(rows: Sequence[int]) -> list[Prompt]:
        return [
            Prompt(
                row=row,
                token_ids=(row,),
                data_source=source_of(row),
                ground_truth="",
                extra_info={},
            )
            for row in rows
        ]

    def generate(prompts: Any, **_: Any) -> RolloutBatch:
        rows = [prompt for prompt in prompts.prompts for _ in range(N)]
        done = Completion(token_ids=(1,), log_probs=(-1.0,), finish_reason="stop", text="")
        return collate(rows, [done] * len(rows))

    def score(batch: RolloutBatch, *_: Any) -> RolloutBatch:
        found = [(prompt.row + i % N) / 24 for i, prompt in enumerate(batch.prompts)]
        return batch.with_fields(scores=torch.tensor(found))

    parts: dict[str, Any] = {
        "dataset": SimpleNamespace(rows=prompts),
        "rollouts": SimpleNamespace(n=N, generate=generate, my_part=range),
        "scorer": SimpleNamespace(means=(), begin=lambda: None, score=score),
    }
    sampler = curriculum()
    drawn = DrawnSource(
        context=context,
        sampler=sampler,
        curriculum=sampler,
        mini_batch_prompts=MINI,
        sources=("other", "third"),
        **parts,
    )
    batches, shares = [], []
    for number in range(6):
        tally = Tally()
        tally.declare(drawn.means)
        watch = Stopwatch(context.device)
        scope = StepScope(number=number, salt=0, watch=watch, tally=tally, may_stop=lambda: None)
        batches.append([prompt.row for prompt in drawn.collect(scope).prompts[::N]])
        shares.append(dict(reduce_tally(tally, context)))
    return {"batches": batches, "shares": shares, "state": sampler.state_dict()}


def collect_all(context: ParallelContext) -> dict[str, Any]:
    """Each case's samples on this rank, metrics over all, and where the sampler is then."""
    found = {}
    for name, (num_rows, max_rounds) in CASES.items():
        sampler = PromptSampler(num_rows, batch_size=BATCH, seed=3, shuffle=True)
        drawn: Any = MadeUp(context=context, sampler=sampler)
        source = DynamicSource(drawn=drawn, n=N, max_rounds=max_rounds, ignores_cut=False)
        tally = Tally()
        watch = Stopwatch(context.device)
        scope = StepScope(number=1, salt=5, watch=watch, tally=tally, may_stop=lambda: None)
        batch = source.collect(scope)
        assert batch.scores is not None
        found[name] = {
            "texts": [c.text for c in batch.completions],
            "sources": [p.data_source for p in batch.prompts],
            "responses": [c.token_ids for c in batch.completions],
            "scores": batch.scores.tolist(),
            "failed": (~batch.is_scored).tolist(),
            "trained": batch.response_mask.any(dim=-1).tolist(),
            "metrics": dict(reduce_tally(tally, context)),
            "sampler": sampler.state_dict(),
        }
    return found
