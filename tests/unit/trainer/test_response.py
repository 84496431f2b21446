"""The order in which decisions of one step are carried out, and what is saved by then."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megappo.config.guard import GuardRule, GuardSection
from megappo.errors import GuardStop
from megappo.trainer.adjustments import Adjustments
from megappo.trainer.guard import Decision, Guard
from megappo.trainer.response import Responder

GOOD, BAD = 4, 5
"""Step of the snapshot, and the one that goes wrong."""


class Host:
    """Notes what a response asks of the run."""

    def __init__(self):
        self.trainer = None
        self.calls = []

    def load_small_state(self, state):
        self.trainer.step_number = state["step"]

    def save(self, step):
        self.calls.append(("save", step))
        return "state saved"

    def finish_save(self):
        self.calls.append(("finish_save",))

    def rewind(self, step):
        self.calls.append(("rewind", step))

    def announce(self, kind, step, text, **details):
        self.calls.append((kind, details["action"]))


def responder(*, num_actions=0):
    host = Host()
    host.trainer = SimpleNamespace(
        guard=Guard(settings=GuardSection(max_actions=3), comparable=True, num_actions=num_actions),
        plan=None,
        adjustments=Adjustments(),
        step_number=BAD,
        on_phase=lambda step, phase: None,
        push_weights=lambda: host.calls.append(("push",)),
    )
    snapshot = SimpleNamespace(state={}, restore=lambda: {"step": GOOD})
    made = Responder(
        host.trainer, host, snapshot=snapshot, checkpoints=Path("none"), longest_sample=8
    )
    return made, host


def decision(action):
    spec = GuardRule(metrics=["m"], above=1.0, action="warn")
    return Decision(rule="r", action=action, reason="m was 2", step=BAD, spec=spec)


def test_a_step_that_is_taken_back_is_not_saved_first():
    made, host = responder(num_actions=3)
    with pytest.raises(GuardStop, match=r"back to step 4 from memory, guard\.max_actions"):
        made.respond([decision("skip_update"), decision("roll_back")])
    assert [call for call in host.calls if call[0] == "save"] == [("save", GOOD)]


def test_a_stop_waits_for_the_way_back():
    made, host = responder()
    with pytest.raises(GuardStop, match=r"back to step 4 from memory, stopped after step 4"):
        made.respond([decision("save_and_stop"), decision("roll_back")])
    assert host.calls[:3] == [("finish_save",), ("rewind", GOOD), ("save", GOOD)]


def test_a_way_back_pushes_the_old_weights_and_changes_the_seeds():
    made, host = responder()
    assert made.respond([decision("warn"), decision("roll_back")])
    assert host.calls == [
        ("guard", "warn"),
        ("finish_save",),
        ("rewind", GOOD),
        ("push",),
        ("guard", "roll_back"),
    ]
    assert host.trainer.adjustments.sampling_salt == 1
    assert host.trainer.guard.num_actions == 1
