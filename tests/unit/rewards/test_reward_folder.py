"""Folders that a program left as nobody would: removed all the same, and known to be over."""

import os

import pytest

from megappo.rewards.folder import is_over, remove_tree

DEPTH = 3000


def nest(top, depth, name="d"):
    """Folders in folders; a path to the last of them may be longer than paths may be."""
    here = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    return here


def test_a_folder_is_removed_however_deep_wide_and_locked_it_is(tmp_path):
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "file").write_text("x")
    last = nest(folder, DEPTH)
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=last))
    os.close(last)
    for number in range(50):
        (folder / f"wide-{number}").mkdir()
        (folder / f"wide-{number}" / "same").mkdir()
        (folder / f"wide-{number}" / "file").write_text("x")
    (folder / "locked").mkdir()
    (folder / "locked" / "in").mkdir(0)
    (folder / "locked").chmod(0)
    (folder / "link").symlink_to(outside)
    (folder / "wide-1" / "link").symlink_to(outside / "file")
    remove_tree(folder)
    assert not folder.exists()
    assert (outside / "file").read_text() == "x"


def test_what_cannot_be_removed_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        remove_tree(tmp_path / "absent")


def test_a_folder_is_over_by_bytes_by_entries_and_by_what_cannot_be_seen(tmp_path):
    def over(max_bytes=100, max_entries=4):
        return is_over(tmp_path, max_bytes=max_bytes, max_entries=max_entries)

    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    (below / "file").write_bytes(b"x" * 100)
    (below / "link").symlink_to(below)
    assert not over(100 + len(str(below)))
    assert over(99)
    assert over(1000, max_entries=3)
    os.close(nest(below, 50, "n" * 200))
    assert over(10**6, 10**6)
    remove_tree(tmp_path / "a")
    assert not over()
    (tmp_path / "locked").mkdir(0)
    assert not over()  # nobody can fill it
    (tmp_path / "hidden").mkdir(0o300)
    assert over()
    (tmp_path / "hidden").chmod(0o700)
