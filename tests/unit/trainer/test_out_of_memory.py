"""What a rank without memory leaves for the next start."""

from megappo.trainer.adjustments import Adjustments
from megappo.trainer.out_of_memory import OutOfMemoryNotes


def test_the_note_with_the_smallest_passes_is_taken_once(tmp_path):
    assert OutOfMemoryNotes(tmp_path, 0).take() is None
    OutOfMemoryNotes(tmp_path, 3).note(Adjustments(halvings=1), 7, "no room")
    OutOfMemoryNotes(tmp_path, 11).note(Adjustments(halvings=2, offloads_all=True), 8, "none")
    taken = OutOfMemoryNotes(tmp_path, 0).take()
    assert taken == {
        "rank": 11,
        "step": 8,
        "text": "rank 11, before the restart: none",
        "halvings": 2,
        "offloads_all": True,
    }
    assert list(tmp_path.iterdir()) == []


def test_adjustments_come_back_from_a_checkpoint():
    changed = Adjustments(kl_factor=4.0, sampling_salt=2, lr_limits={"actor": 1e-6}, halvings=1)
    assert Adjustments.of(changed.state_dict()) == changed
    assert changed.state_dict()["lr_limits"] is not changed.lr_limits
