"""Runs on given answers, as far as no model is needed."""

import json
from pathlib import Path

import pytest

from megappo.config import SupervisedConfig, load_any
from megappo.trainer.supervised.fit import export_folder, is_finished


def make_config(folder: Path, *overrides: str) -> SupervisedConfig:
    path = folder / "rm.yaml"
    path.write_text(
        f"task: rm\nmodel: {{path: {folder}/model}}\n"
        f"data: {{train_files: [{folder}/a.parquet], val_files: [{folder}/b.parquet]}}\n"
        f"trainer: {{run_dir: {folder}/run}}\n"
    )
    config = load_any(path, overrides)
    assert isinstance(config, SupervisedConfig)
    return config


@pytest.mark.parametrize(
    ("exported", "resumed", "expected"),
    [(None, 40, False), (20, 40, False), (40, 40, True), (40, 39, False), (20, 20, False)],
)
def test_an_older_export_is_not_taken_for_this_runs(tmp_path, exported, resumed, expected):
    config = make_config(tmp_path)
    export_folder(config).mkdir(parents=True)
    if exported is not None:
        text = json.dumps({"step": exported})
        (export_folder(config) / "megappo_step.json").write_text(text)
    assert is_finished(config, resumed_step=resumed, total_steps=40) == expected


def test_a_run_without_an_export_is_finished_by_its_last_step(tmp_path):
    config = make_config(tmp_path, "checkpoint.export_hf=false")
    assert is_finished(config, resumed_step=40, total_steps=40)
    assert not is_finished(config, resumed_step=39, total_steps=40)
