"""Which keys a config may have, and what an unknown one may have meant."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from megappo.config.fields import describe, entry_class, section_class
from megappo.config.findings import Findings
from megappo.config.sections import Config

SYNONYMS = {"learning_rate": "lr", "num_epochs": "total_epochs", "batch_size": "train_batch_size"}
"""Words that people try, and the field's own word here."""


def known_part(
    cls: type, given: Mapping[str, Any], prefix: str, found: Findings, root: type = Config
) -> dict[str, Any]:
    """The keys that are known; others are noted, with what they may have meant under `root`."""
    known = {f.name: f for f in dataclasses.fields(cls)}
    kept: dict[str, Any] = {}
    for name, value in given.items():
        key = prefix + str(name)
        if name not in known:
            for leaf in _leaves(value, key):
                found.note(f"{leaf} is not a known key{suggest(leaf, root)}", *meant(leaf, root))
            continue
        section_cls, entry_cls = section_class(known[name]), entry_class(known[name])
        if section_cls is None and entry_cls is None:
            kept[name] = value
        elif not isinstance(value, Mapping):
            found.note(f"{key} is {value!r}: it is a section and must hold keys")
        elif section_cls is not None:
            kept[name] = known_part(section_cls, value, key + ".", found, root)
        else:
            kept[name] = _known_entries(entry_cls, value, key, found, root)
    return kept


def _known_entries(
    cls: type, given: Mapping[str, Any], key: str, found: Findings, root: type
) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for entry, inner in given.items():
        if isinstance(inner, Mapping):
            kept[entry] = known_part(cls, inner, f"{key}.{entry}.", found, root)
        else:
            found.note(f"{key}.{entry} is {inner!r}: it must hold keys")
    return kept


def _leaves(value: Any, key: str) -> Iterator[str]:
    """Dotted names below an unknown key, so that verl's nested ones are recognised."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}")
    else:
        yield key


def suggest(key: str, root: type = Config) -> str:
    """What to add to "is not a known key": verl's name answered with ours, else the nearest."""
    leaves = list(describe(root))
    for leaf in leaves:
        if key and leaf.verl == key:
            return f": it is verl's name; here it is {leaf.key}"
    near = meant(key, root)
    if near:
        return f": did you mean {' or '.join(near)}?"
    head = key.rpartition(".")[0]
    sections = sorted({d.key.partition(".")[0] for d in leaves})
    known = [d.key for d in leaves if d.key.startswith(head + ".")] or sections
    return f"; known: {', '.join(known)}"


def meant(key: str, root: type = Config) -> list[str]:
    """Known keys that an unknown one is close to, those of its own section alone if there are."""
    leaves = list(describe(root))
    by_verl = [d.key for d in leaves if key and d.verl == key]
    if by_verl:
        return by_verl
    head, _, last = key.rpartition(".")
    names = {d.key.rpartition(".")[2] for d in leaves} | {
        d.verl.rpartition(".")[2] for d in leaves if d.verl
    }
    near = difflib.get_close_matches(last, [*names, *SYNONYMS], n=1, cutoff=0.75)
    word = SYNONYMS.get(near[0], near[0]) if near else ""
    found = [
        d.key
        for d in leaves
        if word and word in (d.key.rpartition(".")[2], d.verl.rpartition(".")[2])
    ]
    return [k for k in found if k.startswith(head + ".")] or found
