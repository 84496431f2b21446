"""Which of a failed run's ranks the launcher names as ended by somebody else's signal."""

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megappo.launch import _was_killed


def failure(exitcode: int, *, second: int) -> ProcessFailure:
    made = ProcessFailure(local_rank=0, pid=17, exitcode=exitcode, error_file="none")
    made.timestamp = second
    return made


@pytest.mark.parametrize(
    ("exitcode", "second", "expected"),
    [
        (-9, 100, True),
        (-11, 101, True),
        (-15, 100, False),  # the launcher's own, after another rank's failure
        (-9, 131, False),  # the launcher's own, half a minute later
        (1, 100, False),
    ],
)
def test_a_rank_was_killed_if_the_launcher_did_not_send_the_signal(exitcode, second, expected):
    first = failure(1, second=100)
    assert _was_killed(failure(exitcode, second=second), first) is expected
