"""Whether a run may go on from a checkpoint, and what is different then. No framework is imported.

Refused: other models, data files, data order, number format, or kind of KL controller, and what
Megatron's FSDP cannot do. Anything else may change, the layout too; `config_changes` and
`layout_changes` are the lines that say so.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megappo.errors import CheckpointError

LAYOUT_FIELDS = ("world_size", "tp", "pp", "vp", "cp", "ep", "etp", "dp")

Format = Literal["torch_dist", "fsdp_dtensor"]

FIXED_KEYS = {
    "model.dtype": "weights are stored in it",
    "algorithm.kl_ctrl": "the controller's state is of that kind",
} | {
    f"{role}.lora.{name}": "the adapters are made for it"
    for role in ("actor", "critic")
    for name in ("rank", "alpha", "target_modules")
}
"""Keys that must not change, and why. The sampler compares its own: seed, batch size, shuffle."""

_OF_THE_PLACE = ("trainer.run_dir",)
"""Keys that say where a run lies and nothing about it."""


def format_of(*, fsdp: bool) -> Format:
    """How models are stored with and without `parallel.fsdp`."""
    return "fsdp_dtensor" if fsdp else "torch_dist"


def model_identity(spec: Any) -> dict[str, Any]:
    """What must not change between a checkpoint and a resumed run, as JSON values."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(spec), default=str))
    return values


def flatten(config: Any) -> dict[str, Any]:
    """Every leaf of a config by its dotted key, as JSON values."""
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    return dict(_leaves(values, ""))


def _leaves(values: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        inner = isinstance(value, Mapping)
        found += _leaves(value, f"{prefix}{name}.") if inner else [(prefix + name, value)]
    return found


def layout_changes(saved: Mapping[str, Any], now: Mapping[str, int]) -> list[str]:
    """Degrees that differ, as `tp 2 -> 1`.

    Args:
        saved: the checkpoint's small state.
        now: a value for each of LAYOUT_FIELDS.
    """
    # What an earlier version did not write: no chunks, and experts' degrees of a dense model.
    before = {"vp": 1, "ep": 1, "etp": saved["layout"]["tp"]} | saved["layout"]
    return [f"{k} {before[k]} -> {now[k]}" for k in LAYOUT_FIELDS if before[k] != now[k]]


def device_changes(saved: Mapping[str, Any], device: str) -> tuple[str, ...]:
    """That random streams cannot be those of the checkpoint, which is of another kind of device.

    Args:
        saved: the checkpoint's small state; of this kind if an earlier version wrote it.
        device: `cpu` or `cuda`, of the run that wants to load it.
    """
    before = saved.get("device", device)
    if before == device:
        return ()
    return (
        f"device {before} -> {device}; random streams start anew from trainer.seed and the step",
    )


def check_layout(saved: Mapping[str, Any], now: Mapping[str, int], checkpoint: Path) -> None:
    """Refuses another layout where the format is bound to its own.

    Raises:
        CheckpointError: with the degrees of both.
    """
    changes = layout_changes(saved, now)
    if changes and saved.get("format") == "fsdp_dtensor":
        raise CheckpointError(
            f"{checkpoint} was saved in another layout (checkpoint -> now): {', '.join(changes)}; "
            "with parallel.fsdp a resume needs as many ranks as then: start them, or use a new "
            "trainer.run_dir"
        )


def check_format(saved: Mapping[str, Any], checkpoint: Path, *, fsdp: bool) -> None:
    """Refuses a checkpoint whose weights and optimizer state are of the other format.

    Args:
        saved: of `layout.read_state`; without `format` it is from before there were two.
        checkpoint: its folder, for the message.
        fsdp: whether the run that wants to load it has `parallel.fsdp`.

    Raises:
        CheckpointError: with both formats and what to change.
    """
    found, needed = saved.get("format", "torch_dist"), format_of(fsdp=fsdp)
    if found != needed:
        raise CheckpointError(
            f"{checkpoint} has the format {found}, but parallel.fsdp is {str(fsdp).lower()}, which "
            f"reads {needed}; set parallel.fsdp={str(found == 'fsdp_dtensor').lower()} as when it "
            "was saved, or use a new trainer.run_dir"
        )


def check_task(saved: Mapping[str, Any], task: str, checkpoint: Path) -> None:
    """Refuses the checkpoint of another kind of training.

    Args:
        saved: the checkpoint's small state.
        task: `ppo`, `rm` or `sft`.
        checkpoint: its folder, for the message.

    Raises:
        CheckpointError: with both kinds.
    """
    before = saved["config"].get("task", "ppo")
    if before != task:
        raise CheckpointError(
            f"{checkpoint} is of a run with task {before}, and task is {task} now: use another "
            "trainer.run_dir"
        )


def check_models(
    saved: Mapping[str, Any], now: Mapping[str, Mapping[str, Any]], checkpoint: Path
) -> None:
    """Refuses models of another shape.

    Args:
        saved: the checkpoint's small state.
        now: role -> `model_identity`.
        checkpoint: its folder, for the message.

    Raises:
        CheckpointError: with the fields that differ, or the model that is missing.
    """
    for role, identity in now.items():
        if role not in saved["models"]:
            raise CheckpointError(
                f"{checkpoint} holds no {role}: it is of a run whose algorithm.adv_estimator "
                f"({saved['config']['algorithm.adv_estimator']}) needs none; set it back, or use a "
                "new trainer.run_dir"
            )
        before = dict(saved["models"][role])
        # A checkpoint of an earlier version lacks fields that its models could not have; before
        # there was partial rotation all dimensions were rotated.
        if "rope" in before:
            before["rope"] = {"fraction": 1.0, **before["rope"]}
        differing = [
            f"{k} {before[k]!r} -> {identity[k]!r}" for k in before if before[k] != identity[k]
        ]
        if differing:
            raise CheckpointError(
                f"{checkpoint} holds another {role} (checkpoint -> now): {', '.join(differing)}; "
                "set model.path back, or use a new trainer.run_dir"
            )


def check_config(saved: Mapping[str, Any], now: Mapping[str, Any], checkpoint: Path) -> None:
    """Refuses a config whose difference would make the state mean something else.

    Args:
        saved: the checkpoint's small state.
        now: of `flatten`.
        checkpoint: its folder, for the message.

    Raises:
        CheckpointError: with every such key, both values and the reason.
    """
    before = saved["config"]
    differing = [
        f"{key} {before[key]} -> {now[key]} ({reason})"
        for key, reason in FIXED_KEYS.items()
        if key in before and key in now and before[key] != now[key]
    ]
    if differing:
        raise CheckpointError(
            f"{checkpoint} was saved with other settings (checkpoint -> now): "
            f"{', '.join(differing)}; set them back, or use a new trainer.run_dir"
        )


def config_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Keys with another value than when the checkpoint was written, as `key before -> now`.

    Keys that the checkpoint does not know were added since, and are left out.

    Args:
        saved: the checkpoint's small state.
        now: of `flatten`.
    """
    before = saved["config"]
    return [
        f"{key} {before[key]} -> {value}"
        for key, value in now.items()
        if key in before and before[key] != value and key not in _OF_THE_PLACE
    ]


def check_base_weights(
    saved: Mapping[str, Any], now: Mapping[str, Sequence[Mapping[str, Any]]], checkpoint: Path
) -> None:
    """Refuses other weights below the adapters; their place may change.

    Args:
        saved: the checkpoint's small state.
        now: role with adapters -> `data.identity.file_identities` of its folder's weights.
        checkpoint: its folder, for the message.

    Raises:
        CheckpointError: with the role.
    """
    before = saved.get("base_weights", {})
    for role, files in now.items():
        if before.get(role) != [dict(file) for file in files]:
            raise CheckpointError(
                f"{checkpoint} has the {role}'s adapters alone, and the weights in its folder are "
                "not those that they were trained on; set "
                f"{'model.path' if role == 'actor' else 'critic.path'} back, or use a new "
                "trainer.run_dir"
            )


def check_data(
    saved: Mapping[str, Any], now: Sequence[Mapping[str, Any]], checkpoint: Path
) -> None:
    """Refuses training files with another content; their place may change.

    Args:
        saved: the checkpoint's small state; nothing is compared if an earlier version wrote it.
        now: of `data.identity.file_identities`.
        checkpoint: its folder, for the message.

    Raises:
        CheckpointError: with the first file that differs.
    """
    before = saved.get("train_files")
    if before is None:
        return
    if len(before) != len(now):
        raise CheckpointError(
            f"{checkpoint} was trained on {len(before)} data.train_files, and there are "
            f"{len(now)} now: set them back, or use a new trainer.run_dir"
        )
    for number, (then, file) in enumerate(zip(before, now, strict=True)):
        if {**then, "name": ""} != {**file, "name": ""}:
            raise CheckpointError(
                f"{checkpoint} was trained on other data: data.train_files[{number}] was "
                f"{then['name']} of {then['bytes']} bytes (sha256 of its ends "
                f"{then['sha256_of_ends'][:12]}), and is {file['name']} of {file['bytes']} bytes "
                f"({file['sha256_of_ends'][:12]}) now; set it back, or use a new trainer.run_dir"
            )
