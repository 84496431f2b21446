"""Hears of each response of a batch when it ends, before SGLang's manager returns them together.

SGLang answers a batch of requests with one list, once the last has ended. Its `stream` would send
every few tokens of all of them; here the waiting itself is overheard, which costs no message and
changes neither order nor content.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

Heard = Callable[[int, dict[str, Any]], None]
"""Told the number of a request in its batch, and its answer; on the manager's thread."""


@contextmanager
def overhearing(manager: Any, heard: Heard) -> Iterator[None]:
    """Inside, every answer of the batch that `manager` waits for goes through `heard`."""
    collect = manager._collect_batch_responses

    async def collected(waiting: Sequence[AsyncGenerator[dict[str, Any], None]]) -> Any:
        return await collect([_overheard(number, one, heard) for number, one in enumerate(waiting)])

    manager._collect_batch_responses = collected
    try:
        yield
    finally:
        del manager._collect_batch_responses


async def _overheard(
    number: int, waiting: AsyncGenerator[dict[str, Any], None], heard: Heard
) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(waiting) as answers:
        async for answer in answers:
            heard(number, answer)
            yield answer
