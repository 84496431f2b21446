"""What the end of a run is the end of."""

import pytest

from megappo.config import Config
from megappo.config.sections import TrainerSection
from megappo.data.sampler import PromptSampler
from megappo.trainer.preflight import _end_in_words


@pytest.mark.parametrize(
    ("settings", "total", "expected"),
    [
        (
            {"total_steps": 5},
            5,
            "5 steps, as trainer.total_steps says: up to batch 2 of 3 in epoch 2",
        ),
        (
            {"total_steps": 0, "total_epochs": 2},
            6,
            "6 steps: trainer.total_epochs is 2, and an epoch has 3",
        ),
    ],
)
def test_a_run_says_whether_its_steps_or_its_epochs_are_over(settings, total, expected):
    sampler = PromptSampler(14, batch_size=4, seed=0, shuffle=True)
    config = Config(trainer=TrainerSection(**settings))
    assert _end_in_words(config, sampler, total) == expected
