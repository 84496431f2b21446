"""Folders that cannot serve as a reward model are refused with the reason."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from megappo.config import Config
from megappo.config.reward_model import RewardModelSection
from megappo.config.rewards import RewardSection
from megappo.config.sections import ModelSection
from megappo.errors import DataError, ModelError, UserError
from megappo.trainer.reward_model_checks import check_head, check_reward_model
from megappo.trainer.row_checks import load_tokenizer
from tests.tiny_run import make_model


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("rm")
    make_model(folder / "model", num_hidden_layers=1)
    config = AutoConfig.from_pretrained(folder / "model")
    for name, labels in (("one", 1), ("two", 2)):
        torch.manual_seed(0)
        shutil.copytree(folder / "model", folder / name)
        config.num_labels = labels
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / name)
    shutil.copytree(folder / "one", folder / "other_words")
    file = folder / "other_words" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content))
    shutil.copytree(folder / "one", folder / "other_template")
    (folder / "other_template" / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def check(root, name, sources=("arithmetic",), meaning=None):
    config = Config(
        reward=RewardSection(sources=meaning or {}),
        model=ModelSection(path=str(root / "model")),
        reward_model=RewardModelSection(path=str(root / name) if name else ""),
    )
    tokenizer = load_tokenizer(config.model)
    return check_reward_model(
        config, tokenizer, lambda path: load_tokenizer(replace(config.model, path=path)),
        set(sources),
    )  # fmt: skip


def test_a_classifier_with_one_label_and_the_same_words_will_do(root):
    assert check(root, "one") == []


def test_a_head_has_one_label(root):
    check_head(root / "one")
    with pytest.raises(ModelError, match="a classifier with 2 labels: a reward model has one"):
        check_head(root / "two")
    with pytest.raises(ModelError, match=r"has no score.weight: .*megappo train-rm"):
        check_head(root / "model")


def test_another_tokenizer_is_refused_though_it_has_as_many_words(root):
    with pytest.raises(ModelError, match=r"other_words has another tokenizer than model.path"):
        check(root, "other_words")


def test_another_chat_template_is_a_warning(root):
    assert "another chat template" in check(root, "other_template")[0]


def test_rows_for_a_reward_model_need_one(root):
    with pytest.raises(DataError, match=r"reward_model.path is ''"):
        check(root, "", ["reward_model"])
    assert check(root, "one", ["reward_model"]) == []


@pytest.mark.parametrize("line", ["reward_model", ["length", {"name": "reward_model"}]])
@pytest.mark.parametrize("key", ["*", "mine"])
def test_it_is_what_a_data_source_stands_for_that_counts_not_its_name(root, line, key):
    with pytest.raises(DataError, match=r"'mine', which stands for 'reward_model', and reward_mod"):
        check(root, "", ["mine"], {key: line})
    assert check(root, "one", ["mine"], {key: line}) == []
    assert check(root, "", ["reward_model"], {"reward_model": "length"}) == []


def test_a_weight_that_would_do_nothing_is_refused(root):
    meaning = {"*": [{"name": "reward_model", "weight": 0.5}]}
    with pytest.raises(UserError, match=r"the weight 0\.5, which would do .* reward_model.weight"):
        check(root, "one", ["mine"], meaning)
