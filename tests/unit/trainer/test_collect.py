"""ReMax's greedy baseline, and how a collector puts its parts together."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from megappo.distributed.metrics import Tally
from megappo.trainer.collect import Collector, GreedyFinisher, StepScope
from megappo.trainer.group_metrics import GroupMetrics
from megappo.trainer.stopwatch import Stopwatch
from megappo.trainer.truncation import OverlongFinisher
from megappo.types import Completion, Prompt, collate

ROWS, N = (7, 3, 5), 2


def answers_to(rows, length):
    prompts = [
        Prompt(row=row, token_ids=(1,), data_source="d", ground_truth="", extra_info={})
        for row in rows
    ]
    completions = [
        Completion(
            token_ids=(row,) * length,
            log_probs=(-1.0,) * length,
            finish_reason="stop",
            text=str(row),
        )
        for row in rows
    ]
    return collate(prompts, completions)


class Engines:
    """Answers with four tokens when greedy."""

    n = N
    context = SimpleNamespace(reports_samples=True)

    def greedy(self, prompts, *, step, listener=None):
        assert listener is None
        assert step == 3
        return answers_to([p.row for p in prompts], 4)

    def my_part(self, count):
        return range(count)


class RowScorer:
    """The score is the row. Those of `failing` rows fail, and the first of them by its time."""

    def __init__(self, failing=()):
        self.failing = failing

    def begin(self):
        return None

    def score(self, batch, part, tally, overlap=None):
        assert overlap is None
        assert len(part) == len(batch)
        rows = [p.row for p in batch.prompts]
        failed = [row for row in rows if row in self.failing]
        tally.add("reward/error_rate", len(failed), len(rows))
        tally.add("reward/timeout_rate", len(failed[:1]), len(rows))
        return batch.with_scores(
            torch.tensor(rows, dtype=torch.float32), torch.tensor([r in self.failing for r in rows])
        )


@dataclass(frozen=True)
class Made:
    """A source of samples with a score of 1."""

    means = ()

    def collect(self, scope):
        batch = answers_to([row for row in ROWS for _ in range(N)], 2)
        return batch.with_fields(scores=torch.ones(len(batch)))


def scope():
    watch = Stopwatch(torch.device("cpu"))
    return StepScope(number=3, salt=0, watch=watch, tally=Tally(), may_stop=lambda: None)


SHAPE = OverlongFinisher(max_length=4, buffer=2, factor=1.0, reports=True)


def test_each_sample_gets_the_score_of_its_prompts_greedy_answer():
    step = scope()
    greedy = GreedyFinisher(rollouts=Engines(), scorer=RowScorer(), shape=None)
    found = Collector(source=Made(), scorer=RowScorer(), finishers=[greedy]).collect(step)
    assert found.baselines.tolist() == [7, 7, 3, 3, 5, 5]
    assert found.scores.tolist() == [1.0] * 6
    assert step.tally.sums["critic/baselines/mean"] == (15.0, 3.0)
    assert step.tally.sums["reward/baseline_error_rate"] == (0.0, 3.0)


def test_a_group_whose_greedy_answer_could_not_be_scored_is_not_trained_on():
    step = scope()
    greedy = GreedyFinisher(rollouts=Engines(), scorer=RowScorer(failing=(3,)), shape=None)
    found = Collector(source=Made(), scorer=RowScorer(), finishers=[greedy]).collect(step)
    assert found.response_mask.any(dim=-1).tolist() == [True, True, False, False, True, True]
    assert step.tally.sums["critic/baselines/mean"] == (12.0, 2.0)


def test_failures_of_greedy_answers_are_counted_by_themselves():
    step = scope()
    greedy = GreedyFinisher(rollouts=Engines(), scorer=RowScorer(failing=(3, 7)), shape=None)
    greedy.finish(Made().collect(step), step)
    assert step.tally.sums["reward/baseline_error_rate"] == (2.0, 3.0)
    assert step.tally.sums["reward/baseline_timeout_rate"] == (1.0, 3.0)
    assert set(step.tally.sums) == set(greedy.means), "and in no figure of samples"


def test_greedy_answers_are_shaped_like_samples_and_counted_in_no_other_figure():
    step = scope()
    greedy = GreedyFinisher(rollouts=Engines(), scorer=RowScorer(), shape=SHAPE)
    collector = Collector(
        source=Made(),
        scorer=RowScorer(),
        finishers=[SHAPE, greedy],
        groups=GroupMetrics(n=N, sources=("d",)),
    )
    found = collector.collect(step)
    assert found.baselines.tolist() == [6, 6, 2, 2, 4, 4]  # four tokens: the whole penalty
    assert found.scores.tolist() == [1.0] * 6
    assert set(step.tally.sums) == set(collector.means)
    assert step.tally.sums["reward/overlong_share"] == (0.0, 6.0)
    assert replace(found).select([5, 0]).baselines.tolist() == [4, 6]
