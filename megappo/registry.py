"""Names that a config may choose from, each bound to a factory.

A factory imports its heavy backend only when it is called, so that listing the names costs nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from megappo.errors import UserError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps a name to a `T`. An unknown name is an error that lists the known ones."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that binds `name`; binding a name twice is our own mistake."""

        def bind(entry: T) -> T:
            assert name not in self._entries, f"{self.what} {name!r} is registered twice"
            self._entries[name] = entry
            return entry

        return bind

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise UserError(f"unknown {self.what} {name!r}{did_you_mean(name, self)}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))


def did_you_mean(name: str, known: object) -> str:
    """`" (did you mean 'x'?); known: a, b"` for an error about an unknown name."""
    names = [str(k) for k in known]  # type: ignore[attr-defined]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{hint}; known: {', '.join(names) or 'none'}"
