"""YAML and `key=value` to a validated, read-only `Config`. The only importer of OmegaConf.

Order: every key is known (else the nearest name is offered) -> OmegaConf merges and checks types ->
each section checks itself -> rules between sections. All broken rules are reported together: what
is mistaken is left at its default, and the next stage looks at the rest.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megappo.config.checks import check_sections
from megappo.config.fields import default_of, entry_class, section_class
from megappo.config.findings import Findings
from megappo.config.keys import known_part, suggest
from megappo.config.sections import Config
from megappo.config.supervised import SupervisedConfig
from megappo.config.supervised_checks import check_supervised
from megappo.errors import UserError

TASKS = ("ppo", "rm", "sft")


class ConfigError(UserError):
    """One or more fields of a config break a rule; each line of the message is one of them."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a config file, applies overrides, validates.

    Args:
        path: YAML file.
        overrides: `section.key=value` each, later ones win.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type, or a broken rule.
    """
    config, found = read(path, overrides)
    if found.problems:
        raise ConfigError("\n".join(found.problems))
    return config


def task_of(path: str | Path, overrides: Sequence[str] = ()) -> str:
    """What a config trains: `ppo` where it does not say.

    Raises:
        ConfigError: the file cannot be read, or the task is unknown.
    """
    given = [_read_yaml(Path(path))]
    given += [{"task": text[5:]} for text in overrides if text.startswith("task=")]
    task = next((layer["task"] for layer in reversed(given) if "task" in layer), "ppo")
    if task not in TASKS:
        raise ConfigError(f"task is {task!r}: known: {', '.join(TASKS)}")
    return str(task)


def load_any(path: str | Path, overrides: Sequence[str] = ()) -> Config | SupervisedConfig:
    """As `load` for any task, which says what kind of config it is.

    Raises:
        ConfigError: unreadable file, unknown task or key, wrong type, or a broken rule.
    """
    config, found = read_any(path, overrides)
    if found.problems:
        raise ConfigError("\n".join(found.problems))
    return config


def read(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, Findings]:
    """As `load`, for those who look for more mistakes: all that were found, and a config.

    Mistaken keys of the config have stand-ins, see `Findings`.

    Raises:
        ConfigError: the file cannot be read, or is not of PPO.
    """
    task = task_of(path, overrides)
    if task != "ppo":
        raise ConfigError(f"task is {task!r}: this reads configs of PPO; use megappo train-{task}")
    config, found = _read(Config, path, overrides)
    found.add(*check_sections(config))
    return config, found


def read_any(
    path: str | Path, overrides: Sequence[str] = ()
) -> tuple[Config | SupervisedConfig, Findings]:
    """As `read` for any task.

    Raises:
        ConfigError: the file cannot be read, or the task is unknown.
    """
    if task_of(path, overrides) == "ppo":
        return read(path, overrides)
    config, found = _read(SupervisedConfig, path, overrides)
    found.add(*check_supervised(config))
    return config, found


def _read(cls: type, path: str | Path, overrides: Sequence[str]) -> tuple[Any, Findings]:
    """The config before rules between sections, and what was found."""
    found = Findings()
    given = [_read_yaml(Path(path))]
    for text in overrides:
        layer = found.attempt(partial(_read_override, text))
        if layer is not None:
            given.append(layer)
    given = [known_part(cls, _one_as_list(layer), "", found, cls) for layer in given]
    plain = _merged(cls, given, found)
    problems: list[str] = []
    config = _build(cls, plain, "", problems, found.stand_ins)
    found.problems += problems
    return config, found


def dump(config: Config | SupervisedConfig, path: Path) -> None:
    """Writes the resolved config as YAML; `load` of that file gives an equal config."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))))


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"config file {path} does not exist")
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"config file {path} must hold sections at its top, not a list")
    return {str(k): v for k, v in loaded.items()}


def _read_override(text: str) -> dict[str, Any]:
    key, equals, _ = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override {text!r} is not of the form section.key=value")
    if key.startswith(("+", "~")):
        raise ConfigError(
            f"override {text!r}: keys cannot be added or deleted; leave the {key[0]!r} out to set "
            f"a known key{suggest(key.lstrip('+~'))}"
        )
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([text]))
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"override {text!r} cannot be read: {error}") from error
    assert isinstance(parsed, dict)
    return {str(k): v for k, v in parsed.items()}


def _one_as_list(layer: dict[str, Any]) -> dict[str, Any]:
    """`rollout.url` may be one string."""
    rollout = layer.get("rollout")
    if isinstance(rollout, Mapping) and isinstance(rollout.get("url"), str):
        return {**layer, "rollout": {**rollout, "url": [rollout["url"]]}}
    return layer


def _merged(cls: type, given: Sequence[dict[str, Any]], found: Findings) -> Any:
    """Defaults and layers as plain values of the right types.

    OmegaConf stops at the first wrong one, so that is taken out and the rest merged again.
    """
    while True:
        base = OmegaConf.structured(cls)
        _thaw(base)
        try:
            merged = OmegaConf.merge(base, *(OmegaConf.create(dict(layer)) for layer in given))
            OmegaConf.resolve(merged)
            return OmegaConf.to_container(merged, throw_on_missing=True)
        except OmegaConfBaseException as error:
            message = f"{error.full_key}: {str(error).splitlines()[0]}"
            key = re.sub(r"\[.*", "", str(error.full_key or ""))
            taken = [_take_out(layer, key.split(".")) for layer in given]
            if not any(taken):
                raise ConfigError(message) from error
            found.note(message, key)


def _take_out(layer: dict[str, Any], path: Sequence[str]) -> bool:
    """Removes a key; whether it was there."""
    for name in path[:-1]:
        layer = layer.get(name, {})
        if not isinstance(layer, dict):
            return False
    if path[-1] not in layer:
        return False
    del layer[path[-1]]
    return True


def _thaw(node: DictConfig) -> None:
    """Frozen dataclasses become read-only nodes, and merging needs writable ones."""
    OmegaConf.set_readonly(node, False)
    for name in node:
        child = node._get_node(name)
        if isinstance(child, DictConfig):
            _thaw(child)


def _build(cls: type, values: Any, prefix: str, problems: list[str], stand_ins: set[str]) -> Any:
    """The dataclass with its nested sections, mistaken fields at their defaults.

    Broken rules are added to `problems`, and the keys of such fields to `stand_ins`. None for an
    entry (see `fields.entries`) that breaks a rule.
    """
    made: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        inner, entry, value = section_class(f), entry_class(f), values[f.name]
        if inner:
            value = _build(inner, value, f"{prefix}{f.name}.", problems, stand_ins)
        elif entry:
            entries = {
                name: _build(entry, of_entry, f"{prefix}{f.name}.{name}.", problems, stand_ins)
                for name, of_entry in value.items()
            }
            value = {name: built for name, built in entries.items() if built is not None}
        made[f.name] = value
    try:
        return cls(**made)
    except ValueError as error:
        lines = str(error).splitlines()
    problems += [prefix + line for line in lines]
    return _with_stand_ins(cls, made, {line.partition(" ")[0] for line in lines}, prefix, stand_ins)


def _with_stand_ins(
    cls: type, made: Mapping[str, Any], named: set[str], prefix: str, stand_ins: set[str]
) -> Any:
    """The section with the named fields at their defaults, or with all of them there.

    All, where a rule is about fields that the message does not begin with.
    """
    leaves = [f for f in dataclasses.fields(cls) if not section_class(f)]
    changed = {f.name for f in leaves if made[f.name] != default_of(f)}
    for gone in (named & {f.name for f in leaves}, changed):
        stand_ins |= {prefix + name for name in gone}
        try:
            return cls(**{name: value for name, value in made.items() if name not in gone})
        except ValueError:
            continue
    return None  # an entry, which has no defaults that hold
