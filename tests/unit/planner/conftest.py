import json

import pytest

from megappo.config import Config, load
from megappo.models.spec import spec_from_config
from megappo.planner.job import Job
from tests.unit.planner.published import LLAMA_70B

TEXT = """\
model: {path: nowhere}
data: {train_files: [none.parquet], val_files: [none.parquet], train_batch_size: 512,
  max_prompt_length: 1024}
rollout: {max_response_length: 3072, tp: 8, sleep: true}
actor: {mini_batch_size: 128, micro_batch_size: 1, memory: {recompute: selective}}
critic: {micro_batch_size: 1, memory: {recompute: selective}}
"""
OFFLOAD = [
    *(
        f"{role}.memory.{part}_offload=true"
        for role in ("actor", "critic")
        for part in ("param", "grad", "optimizer")
    ),
    "reference.param_offload=true",
]
SERVERS = ["rollout.url=http://server:30000", "rollout.tp=1", "rollout.sleep=false"]


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    return path


@pytest.fixture
def make_config(config_file):
    def make(*overrides) -> Config:
        return load(config_file, overrides)

    return make


@pytest.fixture
def make_job(make_config):
    """A job in which all roles are one model, Llama-3.1-70B where none is given."""

    def make(*overrides, model=LLAMA_70B, gpus=64, **kwargs) -> Job:
        spec = spec_from_config(model)
        specs = dict.fromkeys(("actor", "critic", "reference"), spec)
        return Job.of(make_config(*overrides), specs, world_size=gpus, **kwargs)

    return make


@pytest.fixture
def save_model(tmp_path):
    """A folder with a config.json and nothing else."""

    def save(settings, name="model") -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(settings))
        return str(folder)

    return save
