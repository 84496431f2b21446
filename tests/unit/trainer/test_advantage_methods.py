"""By name: estimators agree with the config, and each computes what its paper says.

That the result does not depend on the layout is in tests/distributed/test_algorithms.py.
"""

from typing import get_args, get_type_hints

import pytest
import torch

from megappo.config.estimators import ESTIMATORS
from megappo.config.learning import AlgorithmSection
from megappo.trainer.advantage_methods import METHODS
from megappo.types import Completion, Prompt, collate

ROWS = (4, 9, 4, 9)
"""Prompt of each of the four samples: siblings are not neighbours."""
REWARDS = [[-1.0, 2.0], [0.0, 2.0], [3.0, 0.0], [-2.0, 0.0]]
"""The last two samples have one token. Outcomes: 1 and 3 to prompt 4, 2 and -2 to prompt 9."""
VALUES = [[1.0, 2.0], [0.5, 0.0], [1.0, 0.0], [-1.0, 0.0]]
BASELINES = [0.5, -1.0, 0.5, -1.0]
"""Score of the greedy response to each sample's prompt."""


def four_samples():
    prompts = [
        Prompt(row=row, token_ids=(1,), data_source="d", ground_truth="", extra_info={})
        for row in ROWS
    ]
    completions = [
        Completion(token_ids=(5,) * n, log_probs=(-1.0,) * n, finish_reason=reason, text="")
        for n, reason in ((2, "stop"), (2, "stop"), (1, "stop"), (1, "length"))
    ]
    batch = collate(prompts, completions)
    return batch.with_fields(values=torch.tensor(VALUES), baselines=torch.tensor(BASELINES))


def estimated(name, context, **settings):
    """(advantages, returns) of the four samples by the estimator of that name, as lists."""
    method = METHODS[name](AlgorithmSection(adv_estimator=name, **settings), context)
    advantages, returns = method(
        four_samples(), torch.tensor(REWARDS), torch.tensor([7.0, 7.0, 7.0, 8.0])
    )
    return advantages.tolist(), None if returns is None else returns.tolist()


def test_every_estimator_of_the_config_has_traits_and_a_method():
    known = set(get_args(get_type_hints(AlgorithmSection)["adv_estimator"]))
    assert known == set(ESTIMATORS) == set(METHODS)


PER_SAMPLE = {
    # (score - m) / s, m = 2 and 0, s = sqrt(2) and sqrt(8) (divided by n - 1 = 1): 1 / sqrt(2).
    "grpo": (-0.7071063, 0.7071065, 0.7071063, -0.7071065),
    # score - m.
    "dr_grpo": (-1.0, 2.0, 1.0, -2.0),
    # The score less that of the other one: 1 - 3, 2 - -2, 3 - 1, -2 - 2.
    "rloo": (-2.0, 4.0, 2.0, -4.0),
    # score - m, over its deviation over the four responses: variance (1 + 4 + 1 + 4) / 4 = 5/2.
    "reinforce_pp_baseline": (-0.6324555, 1.2649111, 0.6324555, -1.2649111),
    # The score less the greedy one: 1 - 0.5, 2 + 1, 3 - 0.5, -2 + 1.
    "remax": (0.5, 3.0, 2.5, -1.0),
}


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_one_advantage_a_response_is_its_papers_formula(alone, name):
    a, b, c, d = PER_SAMPLE[name]
    advantages, returns = estimated(name, alone)
    for found, expected in zip(advantages, [[a, a], [b, b], [c, 0], [d, 0]], strict=True):
        assert found == pytest.approx(expected, abs=1e-7)
    assert returns is None


def test_reinforce_pp_is_the_whitened_discounted_return_of_each_token(alone):
    # G_t = r_t + G_{t+1} / 2: [-1 + 1, 2], [0 + 1, 2], [3], [-2]. Mean of the six: 6 / 6 = 1;
    # variance: (1 + 1 + 0 + 1 + 4 + 9) / 6 = 8/3. One over its root: 0.6123724.
    u = 0.6123724
    expected = [[-u, u], [0, u], [2 * u, 0], [-3 * u, 0]]
    advantages, returns = estimated("reinforce_pp", alone, gamma=0.5)
    for found, row in zip(advantages, expected, strict=True):
        assert found == pytest.approx(row, abs=1e-6)
    assert returns is None
    bare, _ = estimated("reinforce_pp", alone, gamma=0.5, whiten_advantages=False)
    assert bare == [[0, 2], [1, 2], [3, 0], [-2, 0]]


def test_gae_is_the_whitened_sum_of_deltas_and_has_returns(alone):
    # delta_t = r_t + V_{t+1} / 2 - V_t; the last sample was cut and ends with 8, the others with 0:
    # [-1 + 1 - 1, 2 - 2], [0 + 0 - 0.5, 2 - 0], [3 - 1], [-2 + 4 + 1].
    # A_t = delta_t + A_{t+1} / 4: [-1, 0], [-0.5 + 0.5, 2], [2], [3]. Mean of the six: 1;
    # variance: (4 + 1 + 1 + 1 + 1 + 4) / 6 = 2. One over its root: 0.7071068.
    u = 0.7071068
    expected = [[-2 * u, -u], [-u, u], [u, 0], [2 * u, 0]]
    settings = {"gamma": 0.5, "lam": 0.5, "bootstrap_truncated": True}
    advantages, returns = estimated("gae", alone, **settings)
    for found, row in zip(advantages, expected, strict=True):
        assert found == pytest.approx(row, abs=1e-6)
    # A_t + V_t, before whitening.
    assert returns == [[0, 2], [0.5, 2], [3, 0], [2, 0]]
    # A final end: the last sample is -2 + 1.
    settings |= {"bootstrap_truncated": False, "whiten_advantages": False}
    bare, _ = estimated("gae", alone, **settings)
    assert bare == [[-1, 0], [0, 2], [2, 0], [-1, 0]]
