import pytest

from megappo.errors import UserError
from megappo.registry import Registry


def test_an_unknown_name_is_answered_with_the_nearest_and_all_known_ones():
    registry: Registry[int] = Registry("thing")
    registry.register("apple")(1)
    registry.register("pear")(2)
    assert registry["pear"] == 2
    with pytest.raises(UserError) as error:
        registry["aple"]
    assert str(error.value) == "unknown thing 'aple' (did you mean 'apple'?); known: apple, pear"


def test_a_name_is_bound_once():
    registry: Registry[int] = Registry("thing")
    registry.register("a")(1)
    with pytest.raises(AssertionError, match="registered twice"):
        registry.register("a")(2)
