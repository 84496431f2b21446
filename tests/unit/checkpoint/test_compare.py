"""What of a checkpoint must be as in the run, and what may be other and is told."""

from pathlib import Path

import pytest

from megappo.checkpoint.compare import (
    LAYOUT_FIELDS,
    check_config,
    check_data,
    check_format,
    check_layout,
    check_models,
    config_changes,
    device_changes,
    flatten,
    layout_changes,
)
from megappo.config import Config
from megappo.config.sections import TrainerSection
from megappo.data.identity import file_identities
from megappo.errors import CheckpointError

FOLDER = Path("run/checkpoints/step_000003")


def test_a_format_is_read_by_runs_of_its_kind():
    check_format({"format": "torch_dist"}, FOLDER, fsdp=False)
    check_format({"format": "fsdp_dtensor"}, FOLDER, fsdp=True)


def test_a_checkpoint_that_names_no_format_is_torch_dist():
    check_format({}, FOLDER, fsdp=False)
    with pytest.raises(CheckpointError, match="has the format torch_dist"):
        check_format({}, FOLDER, fsdp=True)


def test_the_other_format_is_refused_with_the_switch_to_set():
    with pytest.raises(CheckpointError) as caught:
        check_format({"format": "fsdp_dtensor"}, FOLDER, fsdp=False)
    message = str(caught.value)
    assert str(FOLDER) in message
    assert "parallel.fsdp is false, which reads torch_dist" in message
    assert "set parallel.fsdp=true" in message


ONE_RANK = dict.fromkeys(LAYOUT_FIELDS, 1)


def test_a_change_of_layout_is_told_by_degree():
    state = {"layout": {**ONE_RANK, "world_size": 2, "tp": 2, "etp": 2}}
    assert layout_changes(state, ONE_RANK) == ["world_size 2 -> 1", "tp 2 -> 1", "etp 2 -> 1"]
    assert layout_changes(state, state["layout"]) == []
    check_layout(state, ONE_RANK, FOLDER)


def test_a_layout_of_an_earlier_version_had_no_chunks_and_no_expert_degrees():
    old = {k: v for k, v in ONE_RANK.items() if k not in ("vp", "ep", "etp")}
    assert layout_changes({"layout": old}, ONE_RANK) == []


def test_another_kind_of_device_is_told_with_what_it_means_for_random_streams():
    (told,) = device_changes({"device": "cpu"}, "cuda")
    assert told.startswith("device cpu -> cuda; random streams start anew")
    assert device_changes({"device": "cuda"}, "cpu") != ()
    assert device_changes({"device": "cpu"}, "cpu") == ()
    assert device_changes({}, "cuda") == ()  # of an earlier version


def test_fully_sharded_state_stays_with_its_number_of_ranks():
    state = {"layout": {**ONE_RANK, "world_size": 2, "dp": 2}, "format": "fsdp_dtensor"}
    check_layout(state, state["layout"], FOLDER)
    with pytest.raises(CheckpointError, match=r"world_size 2 -> 1, dp 2 -> 1.*parallel\.fsdp"):
        check_layout(state, ONE_RANK, FOLDER)


def test_a_changed_setting_is_told_with_both_values_and_the_runs_place_is_not():
    before = flatten(Config(trainer=TrainerSection(run_dir="a", save_freq=5)))
    now = flatten(Config(trainer=TrainerSection(run_dir="b", save_freq=7)))
    state = {"config": {**before, "trainer.of_another_version": 1}}
    check_config(state, now, FOLDER)
    assert config_changes(state, now) == ["trainer.save_freq 5 -> 7"]


def test_a_setting_that_the_checkpoint_does_not_know_is_not_compared():
    now = flatten(Config())
    state = {"config": {k: now[k] for k in ("model.dtype", "algorithm.kl_ctrl")}}
    check_config(state, now, FOLDER)
    assert config_changes(state, now) == []


def test_a_setting_that_state_depends_on_is_refused_with_the_reason():
    now = flatten(Config())
    other = {**now, "model.dtype": "float16", "algorithm.kl_ctrl": "other"}
    with pytest.raises(CheckpointError) as caught:
        check_config({"config": other}, now, FOLDER)
    message = str(caught.value)
    assert f"model.dtype float16 -> {now['model.dtype']} (weights are stored in it)" in message
    assert f"algorithm.kl_ctrl other -> {now['algorithm.kl_ctrl']}" in message
    assert "set them back" in message


def test_another_model_is_refused_with_the_fields_that_differ():
    state = {"models": {"actor": {"num_layers": 4, "hidden_size": 8}}}
    check_models(state, {"actor": {"num_layers": 4, "hidden_size": 8, "new": 1}}, FOLDER)
    with pytest.raises(CheckpointError, match=r"another actor .*num_layers 4 -> 5; set"):
        check_models(state, {"actor": {"num_layers": 5, "hidden_size": 8}}, FOLDER)


def test_a_critic_that_the_checkpoint_does_not_hold_is_refused_with_the_estimator_it_had():
    state = {"models": {"actor": {}}, "config": {"algorithm.adv_estimator": "grpo"}}
    check_models(state, {"actor": {}}, FOLDER)
    with pytest.raises(CheckpointError, match=r"holds no critic: .*adv_estimator \(grpo\)"):
        check_models(state, {"actor": {}, "critic": {}}, FOLDER)


def test_a_model_from_before_partial_rotation_is_the_same_model():
    rope = {"kind": "default", "theta": 1e4}
    state = {"models": {"actor": {"num_layers": 4, "rope": rope}}}
    check_models(state, {"actor": {"num_layers": 4, "rope": rope | {"fraction": 1.0}}}, FOLDER)
    with pytest.raises(CheckpointError, match="another actor"):
        check_models(state, {"actor": {"num_layers": 4, "rope": rope | {"fraction": 0.5}}}, FOLDER)


def test_data_may_move_and_may_not_change(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * (3 * 2**20))
    (tmp_path / "b").write_bytes(b"x" * (3 * 2**20))
    before = file_identities([tmp_path / "a"])
    check_data({"train_files": before}, file_identities([tmp_path / "b"]), FOLDER)
    check_data({}, before, FOLDER)
    (tmp_path / "b").write_bytes(b"x" * (3 * 2**20 - 1) + b"y")
    with pytest.raises(CheckpointError, match=r"train_files\[0\] was a of 3145728 bytes.* is b of"):
        check_data({"train_files": before}, file_identities([tmp_path / "b"]), FOLDER)
    with pytest.raises(CheckpointError, match=r"on 1 data\.train_files, and there are 2 now"):
        check_data({"train_files": before}, before * 2, FOLDER)
