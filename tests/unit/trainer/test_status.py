"""What `status.json` does on a disk without room."""

import json

from megappo.trainer.status import Status


def test_a_full_disk_is_told_once_and_the_file_is_taken_up_again(tmp_path):
    told: list[str] = []
    status = Status(tmp_path, say=told.append)
    status.enter("score", 1)
    new = tmp_path / "status.new"
    for phase in ("update_actor", "save"):
        new.unlink(missing_ok=True)
        new.symlink_to("/dev/full")
        status.enter(phase, 1)
    assert told == [
        "warning    status.json cannot be written: [Errno 28] No space left on device; the run "
        "goes on without"
    ]
    assert json.loads((tmp_path / "status.json").read_text())["phase"] == "score"
    new.unlink()
    status.enter("generate", 2)
    found = json.loads((tmp_path / "status.json").read_text())
    assert (found["step"], found["phase"]) == (2, "generate")
