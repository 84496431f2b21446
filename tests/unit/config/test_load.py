import dataclasses
from pathlib import Path

import pytest

from megappo.config import Config, ConfigError, dump, load, load_any
from megappo.config.fields import describe

MINIMAL = "model: {path: m}\ndata: {train_files: [t.parquet], val_files: [v.parquet]}\n"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(path, overrides)
    return str(error.value)


def test_later_overrides_win_and_defaults_fill_the_rest(config_file):
    config = load(config_file, ["actor.optim.lr=1e-4", "actor.optim.lr=2e-4", "rollout.n=8"])
    assert config.actor.optim.lr == 2e-4
    assert config.rollout.n == 8
    assert config.actor.clip_ratio_c == 3.0
    assert config.data.train_files == ["t.parquet"]


def test_the_config_is_read_only(config_file):
    with pytest.raises(dataclasses.FrozenInstanceError):
        load(config_file).actor.optim.lr = 1.0


def test_a_dumped_config_loads_as_the_same_config(config_file, tmp_path):
    config = load(config_file, ["actor.clip_ratio_high=0.28", "rollout.stop=['\\n\\n']"])
    dump(config, tmp_path / "again.yaml")
    assert load(tmp_path / "again.yaml") == config


def test_a_misspelt_key_is_answered_with_the_nearest(config_file):
    assert "did you mean actor.optim.lr or critic.optim.lr" in message(
        config_file, "trainer.learning_rat=1e-6"
    )
    assert "did you mean rollout.val.temperature?" in message(
        config_file, "rollout.val.tempratur=0"
    )


def test_a_misspelt_key_in_the_file_is_refused_too(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL + "actor: {optim: {weight_dacay: 0.1}}\n")
    assert "actor.optim.weight_dacay is not a known key" in message(path)
    assert "did you mean actor.optim.weight_decay?" in message(path)


def test_keys_cannot_be_added_with_a_plus(config_file):
    assert "keys cannot be added or deleted" in message(config_file, "+actor.foo=1")


def test_an_unknown_section_lists_the_known_ones(config_file):
    assert "known: actor, algorithm, checkpoint" in message(config_file, "zork.blah=1")


def test_verls_name_is_answered_with_ours(config_file, tmp_path):
    key = "actor_rollout_ref.actor.ppo_mini_batch_size"
    expected = f"{key} is not a known key: it is verl's name; here it is actor.mini_batch_size"
    assert expected in message(config_file, f"{key}=4")
    path = tmp_path / "verl.yaml"
    path.write_text(MINIMAL + "actor_rollout_ref: {actor: {ppo_mini_batch_size: 4}}\n")
    assert expected in message(path)


def test_each_of_verls_names_is_given_once():
    names = [d.verl for d in describe(Config) if d.verl]
    assert len(names) == len(set(names)) > 40


def test_every_field_has_a_meaning():
    assert [d.key for d in describe(Config) if len(d.doc) < 5] == []


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.train_batch_size=x", "could not be converted to Integer"),
        ("data.train_batch_size=1.5", "could not be converted to Integer"),
        ("device=gpu", "expected one of ['auto', 'cpu', 'cuda']"),
        ("actor.optim=3", "actor.optim is 3: it is a section and must hold keys"),
        ("actor.optim.lr", "is not of the form section.key=value"),
        ("rollout.temperature=0", "rollout.temperature is 0.0: it must be over 0"),
        ("actor.clip_ratio_c=1.0", "actor.clip_ratio_c is 1.0: it must be over 1"),
        ("algorithm.kl_penalty=k9", "algorithm.kl_penalty is 'k9': known: k1, kl, abs"),
        ("parallel.sequence_parallel=true", "it needs parallel.tp over 1"),
        ("parallel.cp=0", "parallel.cp is 0: it must be over 0"),
        ("critic.optim.min_lr=1", "critic.optim.min_lr is 1.0: it is over lr"),
        ("loggers=[consol]", "loggers has 'consol': known: console, jsonl, tensorboard"),
        ("data.train_files=[]", "data.train_files is []: name at least one"),
        ("data.val_files=[]", "data.val_files is []: name a file, or set trainer.test_freq=0"),
        ("actor.mini_batch_size=100", "it must divide data.train_batch_size (256)"),
        ("algorithm.kl_ctrl=adaptive", "set algorithm.use_kl_in_reward=true"),
        ("algorithm.rollout_is=geometric", "algorithm.rollout_is"),
        ("algorithm.rollout_is_threshold=1", "rollout_is_threshold is 1.0: it must be over 1"),
        ("algorithm.rollout_rs_threshold=inf", "rollout_rs_threshold is inf: it must be over 1"),
        ("guard.warn_log_prob_diff=-1", "guard.warn_log_prob_diff is -1.0: it must be 0 or more"),
        ("rollout.stop_token_ids=[5,-1]", "rollout.stop_token_ids is [5, -1]: a token id is 0"),
        ("rollout.val.max_response_length=-1", "rollout.val.max_response_length is -1"),
    ],
)
def test_a_broken_rule_names_the_field_the_value_and_the_remedy(config_file, override, expected):
    assert expected in message(config_file, override)


def test_broken_rules_of_several_sections_are_reported_together(config_file):
    text = message(config_file, "rollout.temperature=-1", "actor.optim.lr=-1", "algorithm.lam=2")
    assert [line.split(" ")[0] for line in text.splitlines()] == [
        "rollout.temperature",
        "algorithm.lam",
        "actor.optim.lr",
        "actor.optim.min_lr",
    ]


def test_validation_may_be_greedy(config_file):
    assert load(config_file, ["rollout.val.temperature=0"]).rollout.val.temperature == 0.0


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a: [1", "cannot be read"),
        ("- a\n- b\n", "must hold sections at its top"),
        ("model: {path: '${nowhere}'}\n", "cannot be read"),
    ],
)
def test_a_file_that_is_no_config_is_one_clear_error(tmp_path, content, expected):
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    assert expected in message(path)


def test_a_missing_file_is_named(tmp_path):
    assert "nowhere.yaml does not exist" in message(tmp_path / "nowhere.yaml")


def test_the_shipped_configs_are_valid():
    folder = Path(__file__).parents[3] / "configs"
    files = sorted(folder.glob("*.yaml"))
    assert files
    for path in files:
        load_any(path)


def test_a_default_guard_is_changed_by_name_and_others_are_added(config_file, tmp_path):
    config = load(
        config_file,
        [
            "guard.rules.kl.action=none",
            "guard.rules.grad_norm.above=9",
            "guard.rules.mine={metrics: [critic/score/mean], below: 0.1, action: save_and_stop}",
        ],
    )
    rules = config.guard.rules
    assert list(rules)[-1] == "mine"
    assert len(rules) == len(Config().guard.rules) + 1
    assert rules["kl"].action == "none"
    assert (rules["grad_norm"].above, rules["grad_norm"].action) == (9.0, "roll_back")
    assert str(rules["mine"]) == "when critic/score/mean is below 0.1: save_and_stop"
    dump(config, tmp_path / "again.yaml")
    assert load(tmp_path / "again.yaml") == config


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("guard.rules.kl.abov=3", "did you mean guard.rules.NAME.above?"),
        ("guard.rules.kl.action=explode", "guard.rules.kl.action: Invalid value 'explode'"),
        ("guard.rules.kl=3", "guard.rules.kl is 3: it must hold keys"),
        ("guard.rules.mine.action=warn", "guard.rules.mine.metrics is []: name at least one"),
        ("guard.rules.kl.factor=0.5", "guard.rules.kl.action is 'lower_lr': it takes to or factor"),
        (
            "guard.rules.mine={metrics: [actor/kl_loss], above: 1, action: raise_kl_coef, factor: "
            "2}",
            "no KL is in use; set algorithm.use_kl_in_reward=true",
        ),
        ("watchdog.timeout_s=1800", "a hang must be seen before"),
        ("trainer.max_wall_time_s=-1", "trainer.max_wall_time_s is -1.0"),
    ],
)
def test_a_mistake_in_a_guard_is_answered_with_its_name(config_file, override, expected):
    assert expected in message(config_file, override, "actor.use_kl_loss=false")
