"""The trained actor as a Hugging Face folder, `actor_hf/`, at the end of a run.

The folder says of which step it is, so that a run that was killed between its last checkpoint and
the export is not taken for finished because an earlier export is there.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from megappo.config import Config
from megappo.distributed.offload import on_device
from megappo.distributed.parallel import all_ranks_or_none
from megappo.models.hf_export import save_hf
from megappo.models.lora_export import save_peft
from megappo.trainer.ppo_trainer import PPOTrainer

_STEP_FILE = "megappo_step.json"


def export_folder(config: Config) -> Path:
    """Where the trained actor is written."""
    return Path(config.trainer.run_dir) / "actor_hf"


def exported_step(config: Config) -> int | None:
    """The step after which the actor was exported; None if it was not, or not wholly."""
    path = export_folder(config) / _STEP_FILE
    return int(json.loads(path.read_text())["step"]) if path.exists() else None


def export_actor(config: Config, trainer: PPOTrainer) -> Path:
    """Writes the actor under another name, then renames. Collective over the world."""
    context, out = trainer.context, export_folder(config)
    new = out.with_name(f"{out.name}.new")
    with all_ranks_or_none(context, "clearing an old export"):
        if context.is_main and new.exists():
            shutil.rmtree(new)
    model, spec = trainer.actor.trainable, trainer.actor.policy.network.spec
    with on_device(model.memory, "params"):
        save_hf(model.chunks, spec, config.model.path, new)
        if config.actor.lora.rank:
            peft = out.with_name("actor_peft")
            save_peft(model.chunks, spec, config.actor.lora, peft, base=config.model.path)
    with all_ranks_or_none(context, "exporting the actor"):
        if context.is_main:
            (new / _STEP_FILE).write_text(json.dumps({"step": trainer.step_number}) + "\n")
            if out.exists():
                shutil.rmtree(out)
            new.rename(out)
    return out
