"""Room under control groups, on files as the kernel writes them."""

import psutil

from megappo.distributed.host_memory import available_bytes, group_room


def group(folder, *, limit, used, cached=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")


def test_each_group_around_the_process_counts(tmp_path):
    group(tmp_path / "slurm", limit=1000, used=900, cached=50)
    group(tmp_path / "slurm" / "job_7", limit=400, used=100)
    assert sorted(group_room(tmp_path, "/slurm/job_7")) == [150, 300]


def test_a_group_without_a_limit_or_without_files_counts_for_nothing(tmp_path):
    group(tmp_path / "free", limit="max", used=900)
    assert group_room(tmp_path, "/free") == []
    assert group_room(tmp_path, "/nowhere/at/all") == []


def test_no_more_is_available_than_the_machine_has():
    assert 0 < available_bytes() <= psutil.virtual_memory().total
