"""Reward models and fine-tuning in every layout, against one rank and against transformers."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from megappo.data.preferences import write_preferences
from tests.distributed.launch import run_ranks
from tests.tiny_run import make_model

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1500)]

CONFIG = """\
task: rm
device: cpu
model: {{path: "{root}/model", dtype: float32}}
data:
  train_files: ["{root}/data/train.parquet"]
  val_files: ["{root}/data/val.parquet"]
  train_batch_size: 8
  max_length: 128
training: {{optim: {{lr: 1.0e-3, eps: 1.0e-3}}, micro_batch_size: 2}}
trainer: {{run_dir: "{root}/run"}}
"""
LAYOUTS = {
    "one": (1, ["training.micro_batch_size=4"]),
    "tp2_sp": (2, ["parallel.tp=2", "parallel.sequence_parallel=true"]),
    "pp2_padded": (2, ["parallel.pp=2", "parallel.packed=false"]),
    "cp2": (2, ["parallel.cp=2"]),
    "dp2_budget_overlap": (
        2,
        [
            "training.use_dynamic_bsz=true",
            "training.max_token_len_per_gpu=300",
            "training.recompute=full",
            "parallel.overlap_grad_reduce=true",
            "parallel.overlap_param_gather=true",
        ],
    ),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("learn")
    make_model(root / "model")
    for path in write_preferences(root / "data", seed=0, num_train=24, num_val=5):
        rows = pq.read_table(path)
        # Longer wrong answers: rows of a batch differ in length, and so do the answers of a row.
        texts = [r + " " * (i % 4) for i, r in enumerate(rows["rejected"].to_pylist())]
        rows = rows.set_column(2, "rejected", pa.array(texts))
        margins = pa.array([0.1 * (i % 3) for i in range(len(rows))])
        pq.write_table(rows.append_column("margin", margins), path, row_group_size=4)
    config = root / "rm.yaml"
    config.write_text(CONFIG.format(root=root))
    found = {}
    for name, (num_ranks, overrides) in LAYOUTS.items():
        out = root / name
        out.mkdir()
        run_ranks("learn.py", num_ranks, "--config", str(config), "--out", str(out), *overrides)
        found[name] = [torch.load(out / f"rank{r}.pt", weights_only=True) for r in range(num_ranks)]
    return found


OTHERS = [name for name in LAYOUTS if name != "one"]


@pytest.mark.parametrize("task", ["rm", "sft"])
@pytest.mark.parametrize("name", OTHERS)
def test_losses_norms_and_weights_do_not_depend_on_the_layout(results, name, task):
    expected = results["one"][0][task]
    for rank in results[name]:
        for then, now in zip(expected["metrics"], rank[task]["metrics"], strict=True):
            assert {k for k in now if k.startswith("val/")} == {
                k for k in then if k.startswith("val/")
            }
            for key, value in then.items():
                if key.startswith(("rm/", "sft/", "val/")):
                    assert now[key] == pytest.approx(value, rel=2e-5, abs=1e-6), key
        for weight, value in expected["weights"].items():
            gap = (rank[task]["weights"][weight] - value).abs().max() / value.abs().max()
            assert gap < 1e-5, weight


@pytest.mark.parametrize("task", ["rm", "sft"])
def test_steps_learn_something(results, task):
    before, *_, after = results["one"][0][task]["metrics"]
    assert before["val/rows"] == 5
    assert abs(before["val/loss"] - after["val/loss"]) > 1e-3
    assert results["one"][0][task]["metrics"][1][f"{task}/grad_norm"] > 0.01


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_goes_on_bit_for_bit(results, name):
    for rank in results[name]:
        resumed = rank["rm"]["resumed"]
        assert resumed["equal"]
        assert resumed["norms"][0] == resumed["norms"][1] > 0
        assert resumed["losses"][0] == resumed["losses"][1]


def by_transformers(folder: str, ids: list[list[int]]) -> torch.Tensor:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert model.config.num_labels == 1
    with torch.no_grad():
        return torch.tensor([model(torch.tensor([row])).logits.item() for row in ids])


@pytest.mark.parametrize("name", LAYOUTS)
def test_exported_models_score_in_transformers_and_in_ppo_alike(results, name):
    for rank in results[name]:
        scores = rank["rm"]["scores"]
        assert Path(scores["folder"]).is_dir()
        expected = by_transformers(scores["folder"], scores["ids"])
        assert expected.std() > 0.01
        assert torch.allclose(scores["total"], 2 * expected + 0.5, atol=1e-5)
        metrics = scores["metrics"]
        assert metrics["reward/model/mean"] == pytest.approx(expected.mean().item(), abs=1e-5)
        assert metrics["reward/rules/mean"] == 1.0
        seen = expected[:-1].mean().item()
        assert metrics["val/reward_model/mean"] == pytest.approx(seen, abs=1e-5)
