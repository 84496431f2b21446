"""A checkpoint's format must be that of the run."""

from pathlib import Path

import pytest

from megappo.checkpoint.store import check_format
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
