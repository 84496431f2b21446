"""Long answers: the penalty near the limit, and the mask past it."""

import pytest
import torch

from megappo.distributed.metrics import Tally
from megappo.ppo.rewards import overlong_penalty
from megappo.trainer.collect import StepScope
from megappo.trainer.stopwatch import Stopwatch
from megappo.trainer.truncation import MaskCutFinisher, OverlongFinisher
from megappo.types import Completion, Prompt, collate


def batch_of(*samples):
    """One sample for each (length, finish reason)."""
    prompt = Prompt(row=0, token_ids=(1,), data_source="d", ground_truth="", extra_info={})
    completions = [
        Completion(token_ids=(5,) * n, log_probs=(-1.0,) * n, finish_reason=reason, text="")
        for n, reason in samples
    ]
    batch = collate([prompt] * len(samples), completions)
    return batch.with_fields(scores=torch.ones(len(samples)))


def scope():
    watch = Stopwatch(torch.device("cpu"))
    return StepScope(number=1, salt=0, watch=watch, tally=Tally(), may_stop=lambda: None)


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (120, -1.0)]
)
def test_the_penalty_grows_over_the_buffer(length, penalty):
    found = overlong_penalty(torch.tensor([length]), max_length=100, buffer=20, factor=1.0)
    assert found.item() == penalty


def test_a_buffer_may_be_the_whole_length_and_no_more():
    lengths = torch.tensor([0.0, 50.0])
    found = overlong_penalty(lengths, max_length=100, buffer=100, factor=2.0)
    assert found.tolist() == [0.0, -1.0]
    with pytest.raises(ValueError, match="buffer must be from 1 to max_length 100, got 120"):
        overlong_penalty(lengths, max_length=100, buffer=120, factor=1.0)


def test_the_penalty_is_taken_from_the_score_and_reported():
    step = scope()
    shape = OverlongFinisher(max_length=4, buffer=2, factor=0.5, reports=True)
    found = shape.finish(batch_of((2, "stop"), (3, "stop"), (4, "length"), (1, "stop")), step)
    assert found.scores.tolist() == [1.0, 0.75, 0.5, 1.0]
    assert step.tally.sums == {
        "reward/overlong_penalty": (-0.75, 4.0),
        "reward/overlong_share": (2.0, 4.0),
    }
    assert set(step.tally.sums) == set(shape.means)


def test_one_rank_of_a_replica_reports_the_penalty():
    step = scope()
    shape = OverlongFinisher(max_length=4, buffer=2, factor=0.5, reports=False)
    assert shape.finish(batch_of((4, "stop")), step).scores.tolist() == [0.5]
    assert step.tally.sums == {}


def test_cut_responses_keep_no_trained_token():
    found = MaskCutFinisher().finish(batch_of((2, "stop"), (3, "length")), scope())
    assert found.response_mask.tolist() == [[True, True, False], [False, False, False]]
    assert found.response_lengths == [2, 3]
