"""Files that tell of a run and that it can do without: one that cannot be written never ends it.

Events, samples and status are for people and tools. Hours of training must not be lost over them on
a full disk, say, so a failure is a line on the screen. Left out: checkpoints, whose failures
`Saver` answers, and loggers, which are off after their first failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class BestEffort:
    """Tells of a kind of file once, and again where it could be written in between.

    Args:
        say: puts a line on the user's screen.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._failing: set[str] = set()

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """A block whose `OSError` is told instead of raised.

        Args:
            what: the kind of file, by which failures are told once.
        """
        try:
            yield
        except OSError as error:
            if what not in self._failing:
                self._failing.add(what)
                self._say(f"warning    {what} cannot be written: {error}; the run goes on without")
        else:
            self._failing.discard(what)
