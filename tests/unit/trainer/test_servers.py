"""What a config says of servers, before any is asked."""

import pytest

from megappo.config import ConfigError
from megappo.trainer.servers import api_key_of


def test_the_key_is_read_from_the_variable_that_the_config_names(monkeypatch):
    monkeypatch.setenv("A_SERVERS_KEY", "k")
    assert api_key_of("A_SERVERS_KEY") == "k"
    assert api_key_of("") is None


def test_a_key_may_end_in_a_newline_as_in_a_mounted_file(monkeypatch):
    monkeypatch.setenv("A_SERVERS_KEY", "secret\n")
    assert api_key_of("A_SERVERS_KEY") == "secret"


@pytest.mark.parametrize("value", ["sec\nret", "sécret"])
def test_a_key_that_no_header_may_hold_is_refused_and_not_shown(monkeypatch, value):
    monkeypatch.setenv("A_SERVERS_KEY", value)
    with pytest.raises(ConfigError, match="A_SERVERS_KEY") as caught:
        api_key_of("A_SERVERS_KEY")
    assert value not in str(caught.value)


@pytest.mark.parametrize("value", [None, ""])
def test_a_variable_that_is_not_set_is_named(monkeypatch, value):
    monkeypatch.delenv("A_SERVERS_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("A_SERVERS_KEY", value)
    with pytest.raises(ConfigError, match=r"rollout\.api_key_env is 'A_SERVERS_KEY', and no such"):
        api_key_of("A_SERVERS_KEY")
