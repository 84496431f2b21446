"""One way to declare a config field: default, one line of meaning, verl's name for it.

The meaning and verl's name are data, not comments, because error messages, `megappo check` and the
README's table are made from them.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any


def opt(default: Any, doc: str, *, verl: str = "") -> Any:
    """A dataclass field with its meaning; `verl` is verl's full dotted key where it has one."""
    metadata = {"doc": doc, "verl": verl}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type, doc: str, *, verl: str = "") -> Any:
    """A nested section with its own defaults; `verl` stands before its fields' names."""
    return dataclasses.field(default_factory=cls, metadata={"doc": doc, "verl": verl})


def entries(cls: type, default: Mapping[str, Any], doc: str) -> Any:
    """Named sections of one kind, of which a user can add more."""
    return dataclasses.field(
        default_factory=lambda: dict(default), metadata={"doc": doc, "verl": "", "entry": cls}
    )


def section_class(field: dataclasses.Field[Any]) -> type | None:
    """Class of a nested section, see `section`; else None."""
    factory = field.default_factory
    if isinstance(factory, type) and dataclasses.is_dataclass(factory):
        return factory
    return None


def entry_class(field: dataclasses.Field[Any]) -> Any:
    """Class of named sections that a user can add to, see `fields.entries`; else None."""
    return field.metadata.get("entry")


def default_of(field: dataclasses.Field[Any]) -> Any:
    """A field's default value."""
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Described:
    """One leaf of the config, for messages and documents."""

    key: str
    type: str
    default: Any
    doc: str
    verl: str


def describe(cls: type, prefix: str = "", verl: str = "") -> Iterator[Described]:
    """Every leaf field under a config dataclass, in order of declaration."""
    for f in dataclasses.fields(cls):
        value, entry = default_of(f), entry_class(f)
        if dataclasses.is_dataclass(value):
            yield from describe(type(value), f"{prefix}{f.name}.", f.metadata["verl"])
            continue
        yield Described(
            key=prefix + f.name,
            type=str(f.type),
            default=value if entry is None else {name: str(v) for name, v in value.items()},
            doc=f.metadata["doc"],
            verl=verl + f.metadata["verl"] if f.metadata["verl"] else "",
        )
        if entry is not None:
            yield from describe(entry, f"{prefix}{f.name}.NAME.")


class Problems:
    """Collects every broken rule of one section, so that all are reported together.

    A message names the field alone; the loader puts the section's name before it.
    """

    def __init__(self) -> None:
        self.messages: list[str] = []

    def require(self, holds: bool, field: str, value: object, rule: str) -> None:
        """Notes `field is VALUE: RULE` unless the rule holds."""
        if not holds:
            self.messages.append(f"{field} is {value!r}: {rule}")

    def positive(self, **values: float) -> None:
        """Each named value must be over 0."""
        for name, value in values.items():
            self.require(0 < value < math.inf, name, value, "it must be over 0 and finite")

    def not_negative(self, **values: float) -> None:
        """Each named value must be at least 0."""
        for name, value in values.items():
            self.require(0 <= value < math.inf, name, value, "it must be 0 or more, and finite")

    def within(self, low: float, high: float, **values: float) -> None:
        """Each named value must lie in [low, high]."""
        for name, value in values.items():
            self.require(low <= value <= high, name, value, f"it must lie in [{low}, {high}]")

    def done(self) -> None:
        """Raises one ValueError with every message, if there is any."""
        if self.messages:
            raise ValueError("\n".join(self.messages))
