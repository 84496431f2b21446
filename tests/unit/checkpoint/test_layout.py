from pathlib import Path

import pytest

from megappo.checkpoint import layout
from megappo.errors import CheckpointError

KEEP_BEST = layout.KeepPolicy(newest=1, best=True)


def write(folder, step, **state):
    temporary = folder / f"{layout.step_name(step)}.saving"
    (temporary / "actor").mkdir(parents=True)
    layout.write_state(temporary, {"step": step, **state})
    layout.publish(temporary, folder / layout.step_name(step))


def test_the_newest_published_checkpoint_is_the_latest(tmp_path):
    write(tmp_path, 10)
    write(tmp_path, 20)
    assert layout.latest(tmp_path) == tmp_path / "step_000020"
    assert layout.read_state(layout.latest(tmp_path)) == {"step": 20}


def test_an_empty_run_has_no_latest(tmp_path):
    assert layout.latest(tmp_path / "nowhere") is None
    assert layout.latest(tmp_path) is None


def test_a_save_that_was_cut_off_is_not_taken_for_a_checkpoint(tmp_path):
    write(tmp_path, 15)
    half = tmp_path / "step_000020.saving"
    half.mkdir()
    (half / layout.STATE_FILE).write_text('{"step": 20}')
    assert layout.latest(tmp_path) == tmp_path / "step_000015"


def test_without_a_pointer_the_newest_whole_checkpoint_counts_and_never_zero(tmp_path):
    write(tmp_path, 10)
    write(tmp_path, 15)
    (tmp_path / layout.LATEST).unlink()
    assert layout.latest(tmp_path) == tmp_path / "step_000015"


def test_a_pointer_to_nothing_is_an_error_that_lists_what_is_there(tmp_path):
    write(tmp_path, 10)
    (tmp_path / layout.LATEST).write_text("step_000099\n")
    with pytest.raises(CheckpointError, match=r"step_000099.*complete: step_000010"):
        layout.latest(tmp_path)


def test_pruning_keeps_the_newest_and_clears_cut_off_saves(tmp_path):
    for step in (5, 10, 15):
        write(tmp_path, step)
    (tmp_path / "step_000020.saving").mkdir()
    layout.prune(tmp_path, layout.KeepPolicy(newest=2))
    assert layout.complete_steps(tmp_path) == [10, 15]
    assert not (tmp_path / "step_000020.saving").exists()
    assert layout.latest(tmp_path) == tmp_path / "step_000015"


def test_a_removal_that_was_cut_off_leaves_nothing_that_counts_as_a_checkpoint(
    tmp_path, monkeypatch
):
    for step in (5, 10):
        write(tmp_path, step)

    def cut_off(path):
        (path / "actor").rmdir()
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(layout.shutil, "rmtree", cut_off)
        with pytest.raises(OSError, match="killed"):
            layout.prune(tmp_path, layout.KeepPolicy(newest=1))
    assert layout.complete_steps(tmp_path) == [10]
    write(tmp_path, 5)  # after a return to an earlier step
    layout.prune(tmp_path, layout.KeepPolicy(newest=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000005"]


def test_every_kth_and_the_best_are_kept_beside_the_newest(tmp_path):
    policy = layout.KeepPolicy(newest=1, every=4, best=True)
    for step, score in ((2, 0.25), (3, 0.5), (4, None), (5, 0.5), (6, 0.375), (7, None)):
        write(tmp_path, step, val_score=score)
        layout.prune(tmp_path, policy)
    assert layout.complete_steps(tmp_path) == [4, 5, 7]  # of equal scores the newer one
    assert (tmp_path / layout.BEST).read_text() == "step_000005\n"
    assert layout.latest(tmp_path) == tmp_path / "step_000007"


def test_without_a_score_there_is_no_best(tmp_path):
    write(tmp_path, 1)
    layout.prune(tmp_path, layout.KeepPolicy(newest=1, best=True))
    assert not (tmp_path / layout.BEST).exists()


def test_room_is_looked_at_before_anything_is_written(tmp_path):
    layout.check_space(tmp_path, 1000)
    with pytest.raises(OSError, match=r"MiB free and the checkpoint needs 1,095,216,661\.5 MiB"):
        layout.check_space(tmp_path, 2**50)


def test_saving_a_step_again_replaces_it(tmp_path):
    write(tmp_path, 10)
    (tmp_path / "step_000010" / "stale").write_text("x")
    write(tmp_path, 10)
    assert not (tmp_path / "step_000010" / "stale").exists()


def test_an_unreadable_state_is_one_clear_error(tmp_path):
    write(tmp_path, 10)
    (tmp_path / "step_000010" / layout.STATE_FILE).write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read"):
        layout.read_state(tmp_path / "step_000010")


def test_after_a_return_to_an_earlier_step_the_new_checkpoint_is_kept(tmp_path):
    for step in (10, 30, 40):
        write(tmp_path, step)
    (tmp_path / layout.LATEST).write_text("step_000010\n")
    write(tmp_path, 20)
    layout.prune(tmp_path, layout.KeepPolicy(newest=2))
    assert layout.complete_steps(tmp_path) == [20, 40]
    assert layout.latest(tmp_path) == tmp_path / "step_000020"


def test_a_kill_while_a_checkpoint_is_replaced_loses_neither(tmp_path):
    write(tmp_path, 10)
    write(tmp_path, 20)
    # As `publish` of another step 20 leaves it when it is killed between its two renames.
    (tmp_path / "step_000020").rename(tmp_path / "step_000020.replaced")
    found = layout.latest(tmp_path)
    assert found is not None
    assert layout.read_state(found) == {"step": 20}
    write(tmp_path, 20)
    assert layout.latest(tmp_path) == tmp_path / "step_000020"
    assert not (tmp_path / "step_000020.replaced").exists()


@pytest.mark.parametrize(("change", "name"), [("replace", "best.tmp"), ("rename", "step_000020")])
def test_a_start_ends_the_removal_that_a_kill_cut_off(tmp_path, monkeypatch, change, name):
    """As after the last save of a run, which no other save follows."""
    for step, score in ((10, 0.25), (20, 0.0), (30, 0.5)):
        write(tmp_path, step, val_score=score)
    real = getattr(Path, change)

    def or_killed(path, target):
        if path.name == name:
            raise KeyboardInterrupt
        return real(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, change, or_killed)
        with pytest.raises(KeyboardInterrupt):
            layout.prune(tmp_path, KEEP_BEST)
    assert layout.complete_steps(tmp_path) != [30]
    layout.tidy(tmp_path, KEEP_BEST)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "latest", "step_000030"]
    assert (tmp_path / layout.BEST).read_text() == "step_000030\n"
    assert layout.latest(tmp_path) == tmp_path / "step_000030"


def test_a_start_clears_what_killed_saves_left_and_moves_a_pointer_that_was_not_moved(tmp_path):
    write(tmp_path, 10)
    (tmp_path / layout.LATEST).rename(tmp_path / "latest.tmp")  # killed between rename and pointer
    for name in ("step_000020.saving", "step_000005.removed"):
        (tmp_path / name / "actor").mkdir(parents=True)
    layout.tidy(tmp_path, KEEP_BEST)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000010"]
    assert (tmp_path / layout.LATEST).read_text() == "step_000010\n"


def test_a_start_gives_a_checkpoint_that_was_being_replaced_its_name_back(tmp_path):
    write(tmp_path, 10)
    write(tmp_path, 20, val_score=0.5)
    (tmp_path / "step_000020").rename(tmp_path / "step_000020.replaced")
    layout.tidy(tmp_path, KEEP_BEST)
    assert layout.latest(tmp_path) == tmp_path / "step_000020"
    assert layout.read_state(tmp_path / "step_000020") == {"step": 20, "val_score": 0.5}
    assert layout.complete_steps(tmp_path) == [20]


def test_a_start_from_an_older_checkpoint_by_hand_removes_no_newer_one(tmp_path):
    for step in (10, 20, 30):
        write(tmp_path, step)
    (tmp_path / layout.LATEST).write_text("step_000010\n")
    (tmp_path / "step_000040.removed").mkdir()
    layout.tidy(tmp_path, KEEP_BEST)
    assert layout.complete_steps(tmp_path) == [10, 20, 30]
    assert not (tmp_path / "step_000040.removed").exists()
    assert layout.latest(tmp_path) == tmp_path / "step_000010"
