"""What `megappo check --explain KEY` prints about a key, or about a section.

The rule of a key is not written down anywhere but in its section's checks, so those are asked: the
section is built with values that are likely to be wrong, and what it says is the rule.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Iterator
from typing import Any, Literal

from megappo.config.checks import check_sections
from megappo.config.fields import Described, describe, entry_class, section_class
from megappo.config.keys import suggest
from megappo.config.load import ConfigError
from megappo.config.sections import Config

_PROBES: dict[str, tuple[Any, ...]] = {
    "int": (-2, -1, 0),
    "float": (-2.0, -1.0, 0.0, 1.0, 2.0, math.inf),
    "str": ("?",),
}


def explain(key: str) -> str:
    """The text about a key of ours or verl's, or a section's keys.

    Raises:
        ConfigError: there is no such key; the nearest is offered.
    """
    leaves = list(describe(Config))
    wanted = re.sub(r"^guard\.rules\.[^.]+\.", "guard.rules.NAME.", key)
    for leaf in leaves:
        if wanted == leaf.key or (key and key == leaf.verl):
            return _of_key(leaf, asked=key)
    below = [leaf for leaf in leaves if key and leaf.key.startswith(key + ".")]
    if not below:
        raise ConfigError(f"{key!r} is not a known key{suggest(key)}")
    width = max(len(leaf.key) for leaf in below)
    return "".join(f"{leaf.key:<{width}}  {leaf.doc} [{leaf.default!r}]\n" for leaf in below)


def _of_key(leaf: Described, *, asked: str) -> str:
    lines = [leaf.key] if asked != leaf.verl or leaf.verl == leaf.key else []
    if not lines:
        lines = [f"{leaf.key} (in verl: {leaf.verl})"]
    name = leaf.key.rpartition(".")[2]
    kind = typing.get_type_hints(_owner(leaf.key))[name]
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    rules = list(dict.fromkeys(_rules(leaf)))
    rows = {
        "type": "one of several names" if choices else leaf.type,
        "default": repr(leaf.default),
        "allowed": ", ".join(choices) if choices else _allowed(leaf, rules),
        "meaning": leaf.doc,
        "verl": leaf.verl or "has no such key",
    }
    lines += [f"  {name:<8}  {text}" for name, text in rows.items()]
    return "\n".join(lines) + "\n"


def _allowed(leaf: Described, rules: list[str]) -> str:
    if rules:
        return "; ".join(rules)
    return "true, false" if leaf.type == "bool" else "any"


def _rules(leaf: Described) -> Iterator[str]:
    """What the section says about wrong values of the key alone."""
    cls = _owner(leaf.key)
    if (
        "." not in leaf.key and leaf.type == "list[str]"
    ):  # a key of no section: the common rules know it
        problems = check_sections(cls(**{leaf.key: ["?"]}))
        yield from (p.split(": ", 1)[1] for p in problems if p.startswith(f"{leaf.key} has '?'"))
    name = leaf.key.rpartition(".")[2]
    for probe in _PROBES.get(leaf.type.removesuffix(" | None"), ()):
        try:
            cls(**{name: probe})
        except ValueError as error:
            for line in str(error).splitlines():
                subject, _, rule = line.partition(": ")
                if subject == f"{name} is {probe!r}":
                    yield rule


def _owner(key: str) -> Any:
    """The section, or the class of the entries, that has a key as its field."""
    cls: Any = Config
    for name in key.split(".")[:-1]:
        if name == "NAME":
            continue
        (found,) = (f for f in dataclasses.fields(cls) if f.name == name)
        cls = section_class(found) or entry_class(found)
    return cls
