"""YAML and `key=value` to a validated, read-only `Config`. The only importer of OmegaConf.

Order: every key is known (else the nearest name is offered) -> OmegaConf merges and checks types ->
each section checks itself -> rules between sections. All broken rules of a stage are reported
together.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megappo.config.checks import check_sections
from megappo.config.fields import describe
from megappo.config.sections import Config
from megappo.errors import UserError

SYNONYMS = {"learning_rate": "lr", "num_epochs": "total_epochs", "batch_size": "train_batch_size"}
"""Words that people try, and the field's own word here."""


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
    given = [_read_yaml(Path(path)), *(_read_override(o) for o in overrides)]
    given = [_one_as_list(layer) for layer in given]
    unknown = [m for layer in given for m in _unknown_keys(Config, layer, "")]
    if unknown:
        raise ConfigError("\n".join(unknown))
    return _validated(given)


def dump(config: Config, path: Path) -> None:
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
            f"a known key{_suggest(key.lstrip('+~'))}"
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


def _unknown_keys(cls: type, given: Mapping[str, Any], prefix: str) -> Iterator[str]:
    known = {f.name: f for f in dataclasses.fields(cls)}
    for name, value in given.items():
        key = prefix + str(name)
        if name not in known:
            leaves = list(_leaves(value, key))
            yield from (f"{leaf} is not a known key{_suggest(leaf)}" for leaf in leaves)
            continue
        section_cls, entry_cls = _section_class(known[name]), _entry_class(known[name])
        if section_cls is None and entry_cls is None:
            continue
        if not isinstance(value, Mapping):
            yield f"{key} is {value!r}: it is a section and must hold keys"
            continue
        if section_cls is not None:
            yield from _unknown_keys(section_cls, value, key + ".")
            continue
        for entry, inner in value.items():
            if not isinstance(inner, Mapping):
                yield f"{key}.{entry} is {inner!r}: it must hold keys"
                continue
            yield from _unknown_keys(entry_cls, inner, f"{key}.{entry}.")


def _leaves(value: Any, key: str) -> Iterator[str]:
    """Dotted names below an unknown key, so that verl's nested ones are recognised."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}")
    else:
        yield key


def _section_class(field: dataclasses.Field[Any]) -> type | None:
    factory = field.default_factory
    if isinstance(factory, type) and dataclasses.is_dataclass(factory):
        return factory
    return None


def _entry_class(field: dataclasses.Field[Any]) -> Any:
    """Class of named sections that a user can add to, see `fields.entries`; else None."""
    return field.metadata.get("entry")


def _suggest(key: str) -> str:
    """Verl's name answered with ours, else the nearest known key."""
    leaves = list(describe(Config))
    for leaf in leaves:
        if key and leaf.verl == key:
            return f": it is verl's name; here it is {leaf.key}"
    head, _, last = key.rpartition(".")
    names = {d.key.rpartition(".")[2] for d in leaves} | {
        d.verl.rpartition(".")[2] for d in leaves if d.verl
    }
    near = difflib.get_close_matches(last, [*names, *SYNONYMS], n=1, cutoff=0.75)
    meant = SYNONYMS.get(near[0], near[0]) if near else ""
    found = [
        d.key
        for d in leaves
        if meant and meant in (d.key.rpartition(".")[2], d.verl.rpartition(".")[2])
    ]
    same_section = [k for k in found if k.startswith(head + ".")]
    if found:
        return f": did you mean {' or '.join(same_section or found)}?"
    sections = sorted({d.key.partition(".")[0] for d in leaves})
    known = [d.key for d in leaves if d.key.startswith(head + ".")] or sections
    return f"; known: {', '.join(known)}"


def _validated(given: Sequence[Mapping[str, Any]]) -> Config:
    base = OmegaConf.structured(Config)
    _thaw(base)
    try:
        merged = OmegaConf.merge(base, *(OmegaConf.create(dict(layer)) for layer in given))
        OmegaConf.resolve(merged)
        plain = OmegaConf.to_container(merged, throw_on_missing=True)
    except OmegaConfBaseException as error:
        first_line = str(error).splitlines()[0]
        raise ConfigError(f"{error.full_key}: {first_line}") from error
    problems: list[str] = []
    config: Config | None = _build(Config, plain, "", problems)
    if config is None or problems:
        raise ConfigError("\n".join(problems))
    problems = check_sections(config)
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _thaw(node: DictConfig) -> None:
    """Frozen dataclasses become read-only nodes, and merging needs writable ones."""
    OmegaConf.set_readonly(node, False)
    for name in node:
        child = node._get_node(name)
        if isinstance(child, DictConfig):
            _thaw(child)


def _build(cls: type, values: Any, prefix: str, problems: list[str]) -> Any:
    """The dataclass with its nested sections; broken rules are added to `problems`."""
    made: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        inner, entry, value = _section_class(f), _entry_class(f), values[f.name]
        if inner:
            value = _build(inner, value, f"{prefix}{f.name}.", problems)
        elif entry:
            value = {
                name: _build(entry, of_entry, f"{prefix}{f.name}.{name}.", problems)
                for name, of_entry in value.items()
            }
        made[f.name] = value
    if any(made[f.name] is None and _section_class(f) for f in dataclasses.fields(cls)):
        return None
    try:
        return cls(**made)
    except ValueError as error:
        problems += [prefix + line for line in str(error).splitlines()]
        return None
