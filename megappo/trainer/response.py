"""Carries out what guards decide, on all ranks alike, and says so.

Each decision is an event with its reason in `events.jsonl`, a line on the screen and a text in
TensorBoard. An action that would change nothing (a rate that is low enough already) is neither
taken nor counted. After `guard.max_actions` of them the next one saves and stops the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from megappo.checkpoint import layout
from megappo.checkpoint.snapshot import Snapshot, has_room
from megappo.config import Config
from megappo.config.guard import GuardRule
from megappo.distributed.grad_sync import Trainable
from megappo.distributed.offload import PARTS
from megappo.distributed.parallel import all_gather_objects, all_ranks_or_none
from megappo.errors import GuardStop, SaveError
from megappo.trainer.guard import ABANDONING, Decision, StepAbandoned
from megappo.trainer.out_of_memory import MemoryLost
from megappo.trainer.ppo_trainer import PPOTrainer, StepPlan
from megappo.trainer.saver import Saver


class Host(Protocol):
    """What a response needs of the run around the trainer."""

    def small_state(self) -> dict[str, Any]:
        """Step, data position, controller: what is not a tensor."""

    def load_small_state(self, state: Mapping[str, Any]) -> None:
        """Takes it up."""

    def load_checkpoint(self, checkpoint: Path) -> Mapping[str, Any]:
        """Everything from disk but what guards have changed. Collective over the world."""

    def save(self, step: int) -> str:
        """A checkpoint, and what became of it in words. Collective over the world."""

    def finish_save(self) -> None:
        """Waits for the checkpoint that is being written, if any. Collective over the world."""

    def rewind(self, step: int) -> None:
        """Forgets what was logged of later steps."""

    def announce(self, kind: str, step: int, text: str, **details: Any) -> None:
        """An event, a line on the screen and a text for the loggers."""


@dataclass(frozen=True)
class Change:
    """What an action would do."""

    text: str
    act: Callable[[], None]


def make_responder(
    config: Config,
    trainer: PPOTrainer,
    host: Host,
    *,
    saver: Saver,
    local_world_size: int,
) -> Responder:
    """With a snapshot in memory, if one is wanted and fits. Collective over the world.

    Args:
        config: of the run.
        trainer: whose guard it is.
        host: the run around it.
        saver: of the run's checkpoints.
        local_world_size: ranks of this node.
    """
    models, wanted = trainer.trainables, config.guard.snapshot_every > 0
    fits = wanted and has_room(models, trainer.context, local_world_size=local_world_size)
    if wanted and not fits:
        host.announce(
            "warning",
            trainer.step_number,
            "no room in host memory for a snapshot of the training state (or parallel.fsdp): "
            "a guard's roll_back goes back to the latest checkpoint",
        )
    return Responder(
        trainer,
        host,
        saver=saver,
        snapshot=Snapshot(models=models) if fits else None,
        longest_sample=config.data.max_prompt_length + config.rollout.max_response_length,
    )


class Responder:
    """Acts for one run's guard.

    Args:
        trainer: whose guard it is.
        host: the run around it.
        saver: of the run's checkpoints.
        snapshot: in memory; None where only checkpoints on disk are gone back to.
        longest_sample: tokens, which the smallest forward pass must hold.
    """

    def __init__(
        self,
        trainer: PPOTrainer,
        host: Host,
        *,
        saver: Saver,
        snapshot: Snapshot | None,
        longest_sample: int,
    ) -> None:
        self._trainer = trainer
        self._guard = trainer.guard
        self._host = host
        self._saver = saver
        self._snapshot = snapshot
        self._longest_sample = longest_sample
        self._configured = trainer.plan

    def answer_note(self, found: Mapping[str, Any]) -> bool:
        """Makes passes smaller, as a note asks that a rank without memory left before a restart.

        Collective over the world. Returns whether the rules want that.

        Args:
            found: of `OutOfMemoryNotes.take`.

        Raises:
            GuardStop: actions are used up; the state is saved.
        """
        decision = self._guard.out_of_memory(found["step"], found["text"])
        if decision is None:
            return False
        changed = self._trainer.adjustments
        changed.halvings = max(changed.halvings, found["halvings"])
        changed.offloads_all |= found["offloads_all"]
        self.apply_adjustments()
        self.carry_out(decision)
        return True

    def keep(self, step: int) -> None:
        """Copies the state if a copy is due. Collective: `Snapshot.take`."""
        if self._snapshot is None or self._guard.in_doubt:
            return
        if self._snapshot.state is None or step % self._guard.settings.snapshot_every == 0:
            self._snapshot.take(self._host.small_state())

    def respond(self, decisions: Sequence[Decision]) -> bool:
        """Carries decisions out after a step; whether the run was taken back.

        Collective over the world.

        Raises:
            GuardStop: a rule wants it, or actions are used up; the state is saved.
        """
        back = next((d for d in decisions if d.action == "roll_back"), None)
        stop = next((d for d in decisions if d.action == "save_and_stop"), None)
        for decision in decisions:
            if decision.action == "warn":
                self._tell(decision, "")
            # One that would stop the run, because actions are used up, must not save what is
            # about to be taken back.
            elif decision.action not in ABANDONING and not (back and self._used_up):
                self.carry_out(decision)
        if back is not None:
            self.roll_back(stop or back)
            return True
        if stop is not None:
            self._stop(stop, "")
        return False

    def take_back(self, given_up: StepAbandoned | MemoryLost) -> None:
        """From a step that was not finished to an earlier state. Collective over the world.

        Raises:
            MemoryLost: no rule answers it.
            GuardStop: see `roll_back`.
        """
        if isinstance(given_up, StepAbandoned):
            self.roll_back(given_up.decision)
            return
        decision = self._guard.out_of_memory(self._trainer.step_number + 1, str(given_up))
        if decision is None:
            raise given_up
        self.free_memory(decision)

    def roll_back(self, decision: Decision, *, why: str = "", new_samples: bool = True) -> None:
        """Brings back the newest good state, and its weights to the engines.

        Collective over the world.

        Args:
            decision: a rule's; one that wants to stop is obeyed there.
            why: said besides.
            new_samples: sample later steps anew; False repeats what was undisturbed.

        Raises:
            GuardStop: there is nothing to go back to, or the run is to stop there.
            SaveError: see `_replace_later`.
        """
        for given_up in self._guard.take_decided():
            self._tell(given_up, "in a step that is taken back")
        source = self._restore()
        if source is None:
            text = "stopped: there is neither a snapshot nor a checkpoint to go back to"
            self._tell(decision, text)
            raise GuardStop(f"step {decision.step}: {decision.reason}; {text}")
        step = self._trainer.step_number
        self._saver.rewind(step)
        self._guard.forget_streaks()
        if decision.action == "save_and_stop" or self._used_up:
            self._stop(decision, f"back to step {step} from {source}, ", is_back=True)
        self._guard.num_actions += 1
        seeds = "the same seeds"
        if new_samples:
            self._trainer.adjustments.sampling_salt += 1
            seeds = "new sampling seeds"
        self._replace_later(step, decision, source)
        self._host.rewind(step)
        self._trainer.on_phase(step, "sync")
        self._trainer.push_weights()
        self._tell(decision, f"{why}back to step {step} from {source}, with {seeds}")

    def free_memory(self, decision: Decision) -> None:
        """Smaller forward passes, or offload, and back to repeat what was lost, with its samples.

        Collective over the world.

        Raises:
            GuardStop: nothing is left to make smaller, or see `roll_back`.
        """
        change = self._smaller_passes()
        if change is None:
            text = "stopped: forward passes cannot be smaller, and all is offloaded"
            self._tell(decision, text)
            raise GuardStop(f"step {decision.step}: {decision.reason}; {text}")
        change.act()
        self.apply_adjustments()
        self.roll_back(decision, why=f"{change.text}; ", new_samples=False)

    def apply_adjustments(self) -> None:
        """Puts what guards have changed into force, after a change or a load."""
        trainer, changed = self._trainer, self._trainer.adjustments
        for name, model in self._models().items():
            if name in changed.lr_limits:
                model.limit_lr(changed.lr_limits[name])
            if changed.offloads_all and model.memory is not None:
                model.memory.parts = PARTS
        plan = self._configured
        for _ in range(changed.halvings):
            plan = self._halved(plan) or plan
        trainer.plan = plan

    def _restore(self) -> str | None:
        """From where the state was brought back; None if from nowhere.

        The state before the first step cannot be saved (`_replace_later`), so it is gone back to
        only while there is no checkpoint.
        """
        self._host.finish_save()
        latest, copied = self._latest(), None if self._snapshot is None else self._snapshot.state
        if self._snapshot is not None and copied is not None and (copied["step"] or latest is None):
            self._host.load_small_state(self._snapshot.restore())
            return "memory"
        if latest is None:
            return None
        self._host.load_checkpoint(latest[0])
        self.apply_adjustments()
        return str(latest[0])

    def _replace_later(self, step: int, decision: Decision, source: str) -> None:
        """Saves the state gone back to, if that of a step which was given up would be resumed from.

        A run that is killed would go on from there, behind rows that loggers no longer have: so it
        comes before they forget them. Collective over the world.

        Raises:
            SaveError: it failed, and `checkpoint.on_failure` is stop.
        """
        if not self._is_later_saved(step):
            return
        self._trainer.on_phase(step, "save")
        try:
            self._saver.save_anew(step)
        except SaveError:
            self._tell(decision, f"back to step {step} from {source}, which could not be saved")
            raise

    def _is_later_saved(self, step: int) -> bool:
        """Whether a start would go on from a later step. Collective over the world."""
        latest = self._latest()
        return latest is not None and latest[1] > step

    def _latest(self) -> tuple[Path, int] | None:
        """Checkpoint to go on from, and its step. Collective over the world.

        As rank 0 sees it: a shared disk may show other nodes an older pointer.
        """
        context = self._trainer.context
        found: tuple[Path, int] | None = None
        with all_ranks_or_none(context, "looking for a checkpoint"):
            if context.is_main and (path := layout.latest(self._saver.store.folder)) is not None:
                found = path, int(layout.read_state(path)["step"])
        latest: tuple[Path, int] | None = all_gather_objects(found, context.world_group)[0]
        return latest

    def carry_out(self, decision: Decision) -> None:
        """An action that changes settings or was done already; if it changes any.

        Raises:
            GuardStop: actions are used up; the state is saved.
        """
        change = self._change(decision)
        if change is None:
            return
        if self._used_up:
            self._stop(decision, "")
        self._guard.num_actions += 1
        change.act()
        self.apply_adjustments()
        self._tell(decision, change.text)

    def _change(self, decision: Decision) -> Change | None:
        """What the decision would change; None if nothing."""
        if decision.action == "skip_update":
            return Change("the update was skipped on all ranks", lambda: None)
        if decision.action == "lower_lr":
            return self._lower_lr(decision.spec)
        if decision.action == "raise_kl_coef":
            return self._raise_kl_coef(decision.spec)
        assert decision.action == "halve_micro_batch", decision.action
        return self._smaller_passes()

    def _lower_lr(self, rule: GuardRule) -> Change | None:
        limits = {}
        for name, model in self._models().items():
            if rule.role not in (name, "both"):
                continue
            limit = rule.to if rule.to is not None else model.lr * (rule.factor or 1.0)
            if limit < model.lr_limit.value:
                limits[name] = limit
        if not limits:
            return None
        text = ", ".join(f"{name}'s learning rate at most {v:.3g}" for name, v in limits.items())
        return Change(text, lambda: self._trainer.adjustments.lr_limits.update(limits))

    def _raise_kl_coef(self, rule: GuardRule) -> Change:
        changed = self._trainer.adjustments
        factor = changed.kl_factor * (rule.factor or 1.0)
        return Change(
            f"KL coefficients times {factor:.4g}", lambda: setattr(changed, "kl_factor", factor)
        )

    def _smaller_passes(self) -> Change | None:
        """Half the samples or tokens a forward pass; then offload; None where neither is left."""
        changed = self._trainer.adjustments
        if (plan := self._halved(self._trainer.plan)) is not None:
            of_critic = f" and {plan.critic.size} (critic)" if plan.critic is not None else ""
            text = f"forward passes of {plan.actor.size} (actor){of_critic}"
            return Change(text, lambda: setattr(changed, "halvings", changed.halvings + 1))
        memories = [model.memory for model in self._models().values()]
        if all(memory is None or memory.parts == PARTS for memory in memories):
            return None
        return Change(
            f"{' and '.join(self._models())} leave the device between phases",
            lambda: setattr(changed, "offloads_all", True),
        )

    def _halved(self, plan: StepPlan) -> StepPlan | None:
        actor = plan.actor.halved(self._longest_sample)
        critic = None if plan.critic is None else plan.critic.halved(self._longest_sample)
        if actor is None and critic is None:
            return None
        return replace(plan, actor=actor or plan.actor, critic=critic or plan.critic)

    def _models(self) -> dict[str, Trainable]:
        return self._trainer.trainables

    @property
    def _used_up(self) -> bool:
        return self._guard.num_actions >= self._guard.settings.max_actions

    def _stop(self, decision: Decision, before: str, *, is_back: bool = False) -> None:
        step = self._trainer.step_number
        saved = self._host.save(step)
        if is_back and not self._is_later_saved(step):
            self._host.rewind(step)
        limit = ""
        if decision.action != "save_and_stop":
            limit = f"guard.max_actions ({self._guard.settings.max_actions}) are used up, "
        text = f"{before}{limit}stopped after step {step}, {saved}"
        self._tell(decision, text)
        raise GuardStop(f"step {decision.step}: {decision.reason}; {text}")

    def _tell(self, decision: Decision, done: str) -> None:
        self._host.announce(
            "guard",
            decision.step,
            "; ".join(
                filter(None, (f"{decision.action}: {decision.reason}", done, decision.detail))
            ),
            rule=decision.rule,
            action=decision.action,
            reason=decision.reason,
            done=done,
            detail=decision.detail,
        )
