"""What is not finite is left to the guard. The numbers are in test_updates.py, over ranks."""

import math

import pytest
import torch

from megappo.config.learning import AlgorithmSection
from megappo.distributed.metrics import Tally
from megappo.ppo.kl import AdaptiveKLController
from megappo.trainer.estimate import make_estimator
from megappo.types import Completion, Prompt, collate


def batch_of(log_prob):
    prompt = Prompt(row=0, token_ids=(1,), data_source="d", ground_truth="", extra_info={})
    answer = Completion(token_ids=(5,), log_probs=(-1.0,), finish_reason="stop", text="")
    return collate([prompt] * 2, [answer] * 2).with_fields(
        scores=torch.tensor([0.0, 1.0]),
        old_log_probs=torch.tensor([[-1.0], [log_prob]]),
        ref_log_probs=torch.tensor([[-1.5], [-1.5]]),
    )


@pytest.mark.parametrize("log_prob", [-1.0, math.nan, -math.inf])
def test_a_kl_that_is_not_finite_moves_no_coefficient_and_shows(alone, log_prob):
    settings = AlgorithmSection(adv_estimator="rloo", use_kl_in_reward=True, kl_ctrl="adaptive")
    controller, tally = AdaptiveKLController(0.1, 0.1, 100.0), Tally()
    estimator = make_estimator(settings, controller, alone)
    estimator.estimate(batch_of(log_prob), None, tally)
    total, count = tally.sums["actor/reward_kl"]
    assert count == 2
    assert math.isfinite(total) == math.isfinite(log_prob)
    moved = 0.1 * (1 + 0.2 * 2 / 100)
    assert controller.kl_coef == pytest.approx(moved if math.isfinite(log_prob) else 0.1)
