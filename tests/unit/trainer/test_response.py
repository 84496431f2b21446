"""The order in which decisions of one step are carried out, and what is saved by then."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megappo.checkpoint import layout, streams
from megappo.checkpoint.snapshot import Snapshot
from megappo.config.guard import GuardRule, GuardSection
from megappo.distributed.offload import PARTS, Offloader
from megappo.errors import GuardStop, SaveError
from megappo.models.packing import Alignment
from megappo.ppo.kl import AdaptiveKLController
from megappo.trainer.adjustments import Adjustments
from megappo.trainer.guard import Decision, Guard
from megappo.trainer.micro_batches import MicroBatchPlanner
from megappo.trainer.ppo_trainer import StepPlan
from megappo.trainer.response import Responder
from megappo.trainer.run_state import load_progress, progress

GOOD, BAD = 4, 5
"""Step of the snapshot, and the one that goes wrong."""


class Host:
    """Notes what a response asks of the run."""

    def __init__(self):
        self.trainer = None
        self.calls = []

    def load_small_state(self, state):
        self.trainer.step_number = state["step"]

    def load_checkpoint(self, checkpoint):
        self.calls.append(("load", checkpoint.name))
        self.trainer.step_number = layout.read_state(checkpoint)["step"]

    def save(self, step):
        self.calls.append(("save", step))
        return "state saved"

    def finish_save(self):
        self.calls.append(("finish_save",))

    def rewind(self, step):
        self.calls.append(("rewind", step))

    def announce(self, kind, step, text, **details):
        self.calls.append((kind, details["action"]))


class Saver:
    """Writes checkpoints that have nothing but their step, and notes it."""

    def __init__(self, folder, calls):
        self.store = SimpleNamespace(folder=folder)
        self.calls = calls
        self.error = None

    def rewind(self, step):
        self.calls.append(("forget_saves", step))

    def save_anew(self, step):
        self.calls.append(("save_anew", step))
        if self.error is not None:
            raise self.error
        self.write(step)

    def write(self, step):
        final = self.store.folder / layout.step_name(step)
        temporary = final.with_suffix(".saving")
        temporary.mkdir(parents=True)
        layout.write_state(temporary, {"step": step})
        layout.publish(temporary, final)


@pytest.fixture
def make(alone, tmp_path):
    """`responder` of a run with one rank, in a folder of its own."""
    context = SimpleNamespace(world_group=dist.group.WORLD, is_main=True)
    return lambda **settings: responder(context, tmp_path / "checkpoints", **settings)


def responder(
    context, folder, *, num_actions=0, copied=GOOD, plan=None, models=None, snapshot=None
):
    host = Host()
    host.saver = Saver(folder, host.calls)
    host.trainer = SimpleNamespace(
        context=context,
        trainables=models or {},
        guard=Guard(settings=GuardSection(max_actions=3), comparable=True, num_actions=num_actions),
        plan=plan,
        adjustments=Adjustments(),
        step_number=BAD,
        on_phase=lambda step, phase: None,
        push_weights=lambda: host.calls.append(("push",)),
    )
    snapshot = snapshot or SimpleNamespace(state={"step": copied}, restore=lambda: {"step": copied})
    made = Responder(host.trainer, host, saver=host.saver, snapshot=snapshot, longest_sample=8)
    return made, host


def decision(action):
    spec = GuardRule(metrics=["m"], above=1.0, action="warn")
    return Decision(rule="r", action=action, reason="m was 2", step=BAD, spec=spec)


def test_a_step_that_is_taken_back_is_not_saved_first(make):
    made, host = make(num_actions=3)
    with pytest.raises(GuardStop, match=r"back to step 4 from memory, guard\.max_actions"):
        made.respond([decision("skip_update"), decision("roll_back")])
    assert [call for call in host.calls if call[0] == "save"] == [("save", GOOD)]


def test_a_stop_waits_for_the_way_back(make):
    made, host = make()
    with pytest.raises(GuardStop, match=r"back to step 4 from memory, stopped after step 4"):
        made.respond([decision("save_and_stop"), decision("roll_back")])
    assert host.calls[:4] == [
        ("finish_save",), ("forget_saves", GOOD), ("save", GOOD), ("rewind", GOOD),
    ]  # fmt: skip


def test_a_way_back_pushes_the_old_weights_and_changes_the_seeds(make):
    made, host = make()
    assert made.respond([decision("warn"), decision("roll_back")])
    assert host.calls == [
        ("guard", "warn"),
        ("finish_save",),
        ("forget_saves", GOOD),
        ("rewind", GOOD),
        ("push",),
        ("guard", "roll_back"),
    ]
    assert host.trainer.adjustments.sampling_salt == 1
    assert host.trainer.guard.num_actions == 1


class Killed(BaseException):
    """Where a run is killed."""


@pytest.mark.parametrize("killed_at", ["forget_saves", "save_anew", "rewind", "push", "guard"])
@pytest.mark.parametrize("action", ["roll_back", "save_and_stop"])
def test_a_kill_on_the_way_back_leaves_every_row_up_to_the_latest_checkpoint(
    make, action, killed_at
):
    """A given-up step is saved: going on from there, the run would lack the rows dropped here."""
    made, host = make()
    host.saver.write(BAD)
    rows = list(range(1, BAD + 2))

    class Calls(list):
        def append(self, call):
            if call[0] == killed_at:
                raise Killed
            super().append(call)
            if call[0] == "rewind":
                del rows[call[1] :]
            if call == ("save", GOOD):
                host.saver.write(GOOD)

    host.calls = host.saver.calls = Calls()
    with pytest.raises((Killed, GuardStop)):
        made.roll_back(decision(action))
    resumed = layout.read_state(layout.latest(host.saver.store.folder))["step"]
    assert rows[:resumed] == list(range(1, resumed + 1))
    if killed_at in ("push", "guard"):
        assert (resumed, rows) == (GOOD, list(range(1, GOOD + 1)))


def test_a_saved_step_that_is_given_up_is_replaced_with_what_the_guard_has_changed(make):
    made, host = make()
    host.saver.write(BAD)
    salts = []
    host.saver.write = lambda step: salts.append(host.trainer.adjustments.sampling_salt)
    assert made.respond([decision("roll_back")])
    assert salts == [1]
    assert ("save_anew", GOOD) in host.calls


def test_a_way_back_that_cannot_be_saved_drops_no_row_and_is_told(make):
    made, host = make()
    host.saver.write(BAD)
    host.saver.error = SaveError("no room")
    with pytest.raises(SaveError, match="no room"):
        made.roll_back(decision("roll_back"))
    assert host.calls[-1] == ("guard", "roll_back")
    assert not [call for call in host.calls if call[0] in ("rewind", "push")]


def test_a_stop_whose_state_is_not_saved_keeps_the_rows_of_the_latest_checkpoint(make):
    made, host = make()
    host.saver.write(BAD)  # `save` of this host notes its call alone
    with pytest.raises(GuardStop):
        made.roll_back(decision("save_and_stop"))
    assert not [call for call in host.calls if call[0] == "rewind"]


def test_the_state_before_the_first_step_is_gone_back_to_only_without_a_checkpoint(make):
    """It cannot be saved, so nothing could take the checkpoint's place."""
    made, host = make(copied=0)
    made.roll_back(decision("roll_back"))
    assert host.trainer.step_number == 0
    host.saver.write(GOOD)
    made.roll_back(decision("roll_back"))
    assert ("load", "step_000004") in host.calls
    assert host.trainer.step_number == GOOD


def test_out_of_memory_halves_passes_then_offloads_everything_and_then_stops(make):
    module = torch.nn.Linear(2, 2)
    memory = Offloader("actor", [module], parts=())
    passes = MicroBatchPlanner(
        context=None, alignment=Alignment(), mini_batch=4, micro_batch=2, max_tokens=None
    )
    plan = StepPlan(mini_batch=4, actor=passes, critic=None, ppo_epochs=1, critic_warmup=0)
    made, host = make(plan=plan, models={"actor": SimpleNamespace(memory=memory)})
    wanted, changed = decision("halve_micro_batch"), host.trainer.adjustments

    made.free_memory(wanted)
    assert (host.trainer.plan.actor.micro_batch, memory.parts) == (1, ())

    made.free_memory(wanted)
    assert (changed.halvings, changed.offloads_all, memory.parts) == (1, True, PARTS)
    assert host.trainer.plan.actor.micro_batch == 1
    memory.offload()
    assert all(memory.is_away(part) for part in PARTS)
    assert host.calls.count(("push",)) == 2
    assert changed.sampling_salt == 0  # what was lost comes again with the same samples

    done = len(host.calls)
    with pytest.raises(GuardStop, match="forward passes cannot be smaller, and all is offloaded"):
        made.free_memory(wanted)
    assert host.calls[done:] == [("guard", "halve_micro_batch")]


def test_what_was_offloaded_for_want_of_memory_is_offloaded_again_after_a_load(make):
    memory = Offloader("actor", [torch.nn.Linear(2, 2)], parts=("grads",))
    made, host = make(models={"actor": SimpleNamespace(memory=memory)})
    host.trainer.adjustments = Adjustments.of(Adjustments(offloads_all=True).state_dict())
    made.apply_adjustments()
    assert memory.parts == PARTS


def test_a_way_back_brings_the_kl_controllers_coefficient_back(make, monkeypatch):
    monkeypatch.setattr(streams, "capture", dict)
    monkeypatch.setattr(streams, "restore", lambda captured: None)
    made, host = make(snapshot=Snapshot(models={}))
    controller = AdaptiveKLController(0.1, target_kl=1.0, horizon=100.0)
    trainer = host.trainer
    trainer.estimator = SimpleNamespace(kl_controller=controller)
    trainer.sampler = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    host.small_state = lambda: progress(trainer)
    host.load_small_state = lambda state: load_progress(trainer, state)

    controller.update(9.0, 10)
    good = controller.kl_coef
    made.keep(GOOD)
    controller.update(9.0, 10)
    assert controller.kl_coef > good > 0.1
    made.roll_back(decision("roll_back"))
    assert controller.kl_coef == good
