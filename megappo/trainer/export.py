"""The trained model as a Hugging Face folder, `actor_hf/` of PPO, at the end of a run.

The folder says of which step it is, so that a run that was killed between its last checkpoint and
the export is not taken for finished because an earlier export is there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megappo.config import Config
from megappo.distributed.offload import on_device
from megappo.distributed.parallel import ParallelContext, all_ranks_or_none
from megappo.models.hf_export import save_hf
from megappo.models.lora_export import save_peft
from megappo.trainer.ppo_trainer import PPOTrainer

_STEP_FILE = "megappo_step.json"


def export_folder(config: Config) -> Path:
    """Where the trained actor is written."""
    return Path(config.trainer.run_dir) / "actor_hf"


def exported_step(folder: Path) -> int | None:
    """The step after which the model in it was exported; None if it was not, or not wholly."""
    path = folder / _STEP_FILE
    return int(json.loads(path.read_text())["step"]) if path.exists() else None


@contextmanager
def exporting(out: Path, *, step: int, context: ParallelContext) -> Iterator[Path]:
    """The folder to write to, which takes the name `out` at the end. Collective over the world.

    Args:
        out: an older export there is replaced.
        step: after which the model is as it is.
        context: of the run.
    """
    new = out.with_name(f"{out.name}.new")
    with all_ranks_or_none(context, "clearing an old export"):
        if context.is_main and new.exists():
            shutil.rmtree(new)
    yield new
    with all_ranks_or_none(context, "exporting the model"):
        if context.is_main:
            (new / _STEP_FILE).write_text(json.dumps({"step": step}) + "\n")
            if out.exists():
                shutil.rmtree(out)
            new.rename(out)


def export_actor(config: Config, trainer: PPOTrainer) -> Path:
    """Writes the actor under another name, then renames. Collective over the world."""
    context, out = trainer.context, export_folder(config)
    model, spec = trainer.actor.trainable, trainer.actor.policy.network.spec
    with (
        exporting(out, step=trainer.step_number, context=context) as new,
        on_device(model.memory, "params"),
    ):
        save_hf(model.chunks, spec, config.model.path, new)
        if config.actor.lora.rank:
            peft = out.with_name("actor_peft")
            save_peft(model.chunks, spec, config.actor.lora, peft, base=config.model.path)
    return out
