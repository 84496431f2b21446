"""Rules of `rollout.url`."""

import pytest

from megappo.config import ConfigError, dump, load
from megappo.config.batch_plan import plan_batches
from megappo.config.servers import server_owners

ONE = "http://127.0.0.1:30000"


@pytest.fixture
def make(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {train_files: [t], val_files: [v]}\n")
    return lambda *overrides: load(path, overrides)


def test_one_url_may_be_a_string_and_several_are_a_list(make, tmp_path):
    assert make(f"rollout.url={ONE}").rollout.url == [ONE]
    config = make("rollout.url=[http://a:1,https://b/prefix]", "rollout.api_key_env=KEY")
    assert config.rollout.url == ["http://a:1", "https://b/prefix"]
    dump(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.url=127.0.0.1:30000"], "rollout.url has '127.0.0.1:30000': .*http://HOST:PORT"),
        (["rollout.url=ftp://a:1"], "rollout.url has 'ftp://a:1': write http://HOST:PORT"),
        (
            ["rollout.url=http://a:port"],
            "rollout.url has 'http://a:port': .*write http://HOST:PORT",
        ),
        (["rollout.url=http://a..b:80"], "rollout.url has 'http://a..b:80': .*write http"),
        (["rollout.url=http://a:1?x=2"], "leave out what follows"),
        (["rollout.url=[http://a:1,http://a:1/]"], "has 'http://a:1' 2 times: name each"),
        ([f"rollout.url={ONE}", "rollout.engine=megatron"], "rollout.engine is 'megatron' and"),
        ([f"rollout.url={ONE}", "rollout.tp=2"], "rollout.tp is 2 and rollout.url names"),
        ([f"rollout.url={ONE}", "rollout.sleep=true"], "rollout.sleep is True and rollout.url"),
        ([f"rollout.url={ONE}", "rollout.server_wait_s=1800"], "server_wait_s is 1800: the other"),
        ([f"rollout.url={ONE}", "rollout.server_wait_s=0"], "server_wait_s is 0"),
        (["rollout.api_key_env=KEY"], "rollout.api_key_env is set and rollout.url is"),
        (["rollout.sync_address=10.0.0.1"], "rollout.sync_address is set and rollout.url is"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(make, overrides, message):
    with pytest.raises(ConfigError, match=message):
        make(*overrides)


@pytest.mark.parametrize(
    "override", ["rollout.url=http://me:tops3cret@a:1", "rollout.api_key_env=tops3cret-key"]
)
def test_a_secret_in_the_config_is_refused_and_not_repeated(make, override):
    with pytest.raises(ConfigError) as caught:
        make(f"rollout.url={ONE}", override)
    assert "tops3cret" not in str(caught.value)


def test_more_servers_than_ranks_are_refused_with_both_numbers(make):
    config = make("rollout.url=[http://a:1,http://b:1,http://c:1]", "parallel.tp=2")
    plan, problems = plan_batches(config, 2)
    assert plan is None
    assert "rollout.url names 3 servers and there are 2 ranks" in problems[0]
    plan, problems = plan_batches(config, 4)
    assert problems == []
    assert "rollout    3 servers for 4 ranks" in plan.lines()


def test_owners_are_spread_evenly():
    assert server_owners(1, 8) == [0]
    assert server_owners(2, 8) == [0, 4]
    assert server_owners(3, 4) == [0, 1, 2]
    assert server_owners(4, 4) == [0, 1, 2, 3]
    for servers in range(1, 9):
        owners = server_owners(servers, 8)
        assert len(set(owners)) == servers
        assert max(owners) < 8
