import pytest

from megappo.rollout.device_memory import GIB, wait_until_released
from megappo.rollout.engine import EngineRefused


def reader(values):
    """A device whose free bytes are one value a look; the last one stays."""
    left = list(values)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def test_a_release_is_waited_for_until_the_memory_is_free():
    free = reader([100, 150, 700, 1050])
    assert wait_until_released(free, before=100, expected=1000, timeout_s=5) == 950


def test_nine_tenths_of_the_expected_memory_are_enough_and_less_is_not():
    assert wait_until_released(lambda: 900, before=0, expected=1000, timeout_s=0) == 900
    with pytest.raises(EngineRefused, match="came free within 0 s"):
        wait_until_released(lambda: 899, before=0, expected=1000, timeout_s=0)


def test_memory_that_stays_taken_is_an_error_with_both_amounts():
    free = reader([int(3 * GIB)])
    with pytest.raises(EngineRefused, match=r"only 1\.00 of 4\.00 GiB .* within 0\.1 s"):
        wait_until_released(free, before=int(2 * GIB), expected=int(4 * GIB), timeout_s=0.1)
