"""What corrections do to a step's samples, and what is reported of it."""

import math

import pytest
import torch

from megappo.config import load
from megappo.distributed.metrics import Tally
from megappo.trainer.build import make_corrector
from megappo.trainer.corrector import Correction, Corrector
from megappo.types import Completion, Prompt, collate


def batch_with(*ratios):
    """Samples whose tokens have the given trainer over engine probabilities."""
    prompts, completions = [], []
    for row, of_tokens in enumerate(ratios):
        prompts.append(
            Prompt(row=row, token_ids=(1,), data_source="d", ground_truth="", extra_info={})
        )
        completions.append(
            Completion(
                token_ids=(5,) * len(of_tokens),
                log_probs=tuple(-1.0 - math.log(r) for r in of_tokens),
                finish_reason="stop",
                text="",
            )
        )
    batch = collate(prompts, completions)
    return batch.with_fields(old_log_probs=torch.full(batch.responses.shape, -1.0))


def measured(corrector, sampled, corrected):
    tally = Tally()
    corrector.measure(tally, sampled, corrected)
    assert set(tally.sums) == set(corrector.means)
    return {name: total / count for name, (total, count) in tally.sums.items()}


def test_weights_and_rejection_are_applied_and_reported_over_what_was_sampled():
    sampled = batch_with([1.0, 3.0], [0.5, 0.1, 1.5])
    corrector = Corrector(
        weigh=Correction(level="token", threshold=2.0),
        reject=Correction(level="token", threshold=2.5),
    )
    corrected = corrector.correct(sampled)
    expected = torch.tensor([[1.0, 2.0, 0.0], [0.5, 0.1, 1.5]])
    assert torch.allclose(corrected.rollout_is_weights, expected, atol=1e-6)
    assert corrected.response_mask.tolist() == [[True, False, False], [True, False, True]]
    assert measured(corrector, sampled, corrected) == {
        "rollout/is_weight_mean": pytest.approx(5.1 / 5),
        "rollout/is_truncated_share": 0.2,
        "rollout/rs_rejected_share": 0.4,
    }


def test_each_correction_works_without_the_other():
    sampled = batch_with([1.0, 3.0])
    weigh = Corrector(weigh=Correction(level="sequence", threshold=9.0), reject=None)
    corrected = weigh.correct(sampled)
    assert torch.equal(corrected.response_mask, sampled.response_mask)
    assert measured(weigh, sampled, corrected) == {
        "rollout/is_weight_mean": pytest.approx(3.0),
        "rollout/is_truncated_share": 0.0,
    }
    reject = Corrector(weigh=None, reject=Correction(level="sequence", threshold=2.0))
    corrected = reject.correct(sampled)
    assert corrected.rollout_is_weights is None
    assert measured(reject, sampled, corrected) == {"rollout/rs_rejected_share": 1.0}


def test_weights_move_with_their_samples():
    sampled = batch_with([1.0], [1.5], [0.5])
    corrector = Corrector(weigh=Correction(level="token", threshold=2.0), reject=None)
    moved = corrector.correct(sampled).select([2, 0])
    assert moved.rollout_is_weights[:, 0].tolist() == pytest.approx([0.5, 1.0])


def test_the_config_chooses_the_corrections(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {train_files: [t], val_files: [v]}\n")
    assert make_corrector(load(path)) is None
    made = make_corrector(load(path, ["algorithm.rollout_is=token"]))
    assert made == Corrector(weigh=Correction(level="token", threshold=2.0), reject=None)
    made = make_corrector(
        load(path, ["algorithm.rollout_rs=sequence", "algorithm.rollout_rs_threshold=3"])
    )
    assert made == Corrector(weigh=None, reject=Correction(level="sequence", threshold=3.0))
