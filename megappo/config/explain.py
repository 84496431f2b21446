"""What `megappo check --explain KEY` prints about a key, or about a section.

The rule of a key is not written down anywhere but in its section's checks, so those are asked: the
section is built with values that are likely to be wrong, and what it says is the rule.

PPO's keys are asked first; those of `task: rm` and `sft` that it lacks say whose they are.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from megappo.config.checks import check_sections
from megappo.config.fields import Described, describe, entry_class, section_class
from megappo.config.keys import suggest
from megappo.config.load import ConfigError
from megappo.config.sections import Config
from megappo.config.supervised import SupervisedConfig

_OF_OTHERS = "with task: rm or sft"

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
    wanted = re.sub(r"^guard\.rules\.[^.]+\.", "guard.rules.NAME.", key)
    leaves = list(describe(Config))
    names = {leaf.key for leaf in leaves}
    others = [leaf for leaf in describe(SupervisedConfig) if leaf.key not in names]
    for root, known in ((Config, leaves), (SupervisedConfig, others)):
        for leaf in known:
            if wanted == leaf.key or (key and key == leaf.verl):
                return _of_key(leaf, root, asked=key)
    below = [_listed(found, key) for found in (leaves, others)]
    if not any(below):
        head = key.partition(".")[0]
        root = SupervisedConfig if _listed(others, head) and not _listed(leaves, head) else Config
        raise ConfigError(f"{key!r} is not a known key{suggest(key, root)}")
    return f"\n{_OF_OTHERS}:\n".join(below) if all(below) else below[0] or below[1]


def _listed(leaves: Sequence[Described], section: str) -> str:
    below = [leaf for leaf in leaves if section and leaf.key.startswith(section + ".")]
    width = max((len(leaf.key) for leaf in below), default=0)
    return "".join(f"{leaf.key:<{width}}  {leaf.doc} [{leaf.default!r}]\n" for leaf in below)


def _of_key(leaf: Described, root: type, *, asked: str) -> str:
    lines = [leaf.key] if asked != leaf.verl or leaf.verl == leaf.key else []
    if not lines:
        lines = [f"{leaf.key} (in verl: {leaf.verl})"]
    if root is SupervisedConfig:
        lines = [f"{leaf.key} ({_OF_OTHERS})"]
    name = leaf.key.rpartition(".")[2]
    kind = typing.get_type_hints(_owner(leaf.key, root))[name]
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    rules = list(dict.fromkeys(_rules(leaf, root)))
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


def _rules(leaf: Described, root: type) -> Iterator[str]:
    """What the section says about wrong values of the key alone."""
    cls = _owner(leaf.key, root)
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


def _owner(key: str, root: type) -> Any:
    """The section, or the class of the entries, that has a key of `root` as its field."""
    cls: Any = root
    for name in key.split(".")[:-1]:
        if name == "NAME":
            continue
        (found,) = (f for f in dataclasses.fields(cls) if f.name == name)
        cls = section_class(found) or entry_class(found)
    return cls
