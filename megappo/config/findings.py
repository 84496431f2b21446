"""Every mistake of a run in one list: a stage that fails does not hide what others would find.

A value that breaks a rule is replaced by a stand-in, so that the stages after it have something to
look at. What they then say about a key with a stand-in would be about a value that nobody wrote,
and is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from megappo.errors import UserError

T = TypeVar("T")


class Findings:
    """The mistakes found so far, in the order of the stages; each message once."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.stand_ins: set[str] = set()
        """Dotted keys whose values are not the user's."""
        self._errors: list[UserError] = []

    def note(self, message: str, *keys: str) -> None:
        """Notes a mistake; the keys have stand-ins from here on."""
        if message not in self.problems:
            self.problems.append(message)
        self.stand_ins |= set(keys)

    def add(self, *messages: str) -> None:
        """Notes mistakes, but for those that name a key with a stand-in."""
        for message in messages:
            if not self._is_about_stand_in(message):
                self.note(message)

    def attempt(self, check: Callable[[], T], *, needs: tuple[str, ...] = ()) -> T | None:
        """What a stage returns; None where it found a mistake, or cannot say anything.

        Args:
            check: the stage; it raises a `UserError` for a mistake.
            needs: keys without which it is not even started if they have stand-ins.
        """
        if self.stand_ins.intersection(needs):
            return None
        try:
            return check()
        except UserError as error:
            self.add(str(error))
            self._errors.append(error)
            return None

    def raise_any(self) -> None:
        """Raises the one mistake, or all of them as one error.

        Raises:
            UserError: there is any.
        """
        if not self.problems:
            return
        if len(self.problems) == 1:
            only = self.problems[0]
            raise next((e for e in self._errors if str(e) == only), UserError(only))
        lines = [f"  - {problem}" for problem in self.problems]
        raise UserError("\n".join([f"{len(lines)} problems:", *lines]))

    def _is_about_stand_in(self, message: str) -> bool:
        named = set(re.findall(r"[a-z]\w*(?:\.\w+)+", message))
        return bool(named & self.stand_ins)
