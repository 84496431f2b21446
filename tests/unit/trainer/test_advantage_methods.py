"""Names of estimators agree; what they compute is in test_algorithms.py, over ranks."""

from typing import get_args, get_type_hints

from megappo.config.estimators import ESTIMATORS
from megappo.config.learning import AlgorithmSection
from megappo.trainer.advantage_methods import METHODS


def test_every_estimator_of_the_config_has_traits_and_a_method():
    known = set(get_args(get_type_hints(AlgorithmSection)["adv_estimator"]))
    assert known == set(ESTIMATORS) == set(METHODS)
