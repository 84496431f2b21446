import json
from pathlib import Path

import pytest

from megappo.errors import ModelError, UserError
from megappo.rollout.sampling import SamplingSettings, end_token_ids, sample_seed


def test_seeds_of_siblings_differ_and_fit_int64():
    seeds = [sample_seed(7, step=3, row=11, sample=k) for k in range(1000)]
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_changes_with_each_of_its_inputs():
    base = sample_seed(7, step=3, row=11, sample=2)
    others = [
        sample_seed(8, step=3, row=11, sample=2),
        sample_seed(7, step=4, row=11, sample=2),
        sample_seed(7, step=3, row=12, sample=2),
        sample_seed(7, step=3, row=11, sample=3),
        sample_seed(7, step=31, row=1, sample=2),
    ]
    assert len({base, *others}) == 6


def test_a_seed_is_the_same_in_every_process():
    assert sample_seed(0, step=0, row=0, sample=0) == 2278555635313344512


def test_seeds_of_many_prompts_do_not_collide():
    seeds = {
        sample_seed(1, step=step, row=row, sample=0) for step in range(100) for row in range(500)
    }
    assert len(seeds) == 50_000


def test_more_samples_than_can_be_kept_apart_are_refused():
    with pytest.raises(UserError, match="65536"):
        sample_seed(0, step=0, row=0, sample=65536)


def test_settings_become_sglang_parameters():
    settings = SamplingSettings(
        max_new_tokens=5, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, stop=("##",),
        stop_token_ids=(1, 2),
    )  # fmt: skip
    assert settings.to_sglang(seed=9) == {
        "max_new_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "stop": ["##"],
        "stop_token_ids": [1, 2],
        "ignore_eos": False,
        "sampling_seed": 9,
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": 0},
        {"min_p": 1.0},
        {"stop": ("",)},
    ],
)
def test_impossible_settings_are_refused_by_name(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(UserError, match="stop string" if name == "stop" else name) as error:
        SamplingSettings(**{"max_new_tokens": 4, **wrong})
    assert repr(value) in str(error.value)


def test_truncation_is_known():
    assert not SamplingSettings(max_new_tokens=4).truncates
    assert SamplingSettings(max_new_tokens=4, top_p=0.9).truncates
    assert SamplingSettings(max_new_tokens=4, top_k=5).truncates
    assert SamplingSettings(max_new_tokens=4, min_p=0.05).truncates


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 3]}, {"eos_token_id": 3}, (3, 7)),
        ({"eos_token_id": 0}, {"eos_token_id": 3}, (0,)),
        ({}, {"eos_token_id": 3}, (3,)),
        (None, {"eos_token_id": [5]}, (5,)),
    ],
)
def test_end_tokens_come_from_generation_config_first(tmp_path: Path, generation, config, expected):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert end_token_ids(tmp_path) == expected


def test_end_token_falls_back_to_the_tokenizer(tiny_model: Path, tmp_path: Path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    assert end_token_ids(tmp_path) == (1,)


def test_a_model_without_end_token_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="names no end token"):
        end_token_ids(tmp_path)
