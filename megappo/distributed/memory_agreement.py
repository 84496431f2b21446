"""All ranks learn that one of them found no device memory, where a pass has no collectives.

That is so in pure data parallelism without overlapped gradients: ranks meet only when gradients are
reduced. In any other layout the others already wait in a collective of the pass, and the error of
the one rank ends the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megappo.config.layout import ParallelSection
from megappo.distributed.parallel import ParallelContext, all_gather_objects, any_rank


class MemoryLost(RuntimeError):  # noqa: N818, an outcome and not a mistake
    """A rank found no device memory. Raised on all ranks alike."""


class MemoryAgreement:
    """What ranks tell each other after a pass; nothing where they cannot (`possible` is False)."""

    def __init__(self, context: ParallelContext, layout: ParallelSection) -> None:
        self._context = context
        self.possible = (
            context.model_size == 1
            and context.ep == 1
            and not layout.overlap_grad_reduce
            and not layout.fsdp
        )

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """After the block all ranks know whether one lacked memory. Collective over the world.

        Raises:
            MemoryLost: on all ranks, if one did.
        """
        if not self.possible:
            yield
            return
        found = ""
        try:
            yield
        except torch.OutOfMemoryError as error:
            found = str(error)
        self.agree(found)

    def agree(self, found: str) -> None:
        """Collective over the world, if `possible`.

        Args:
            found: this rank's error; empty if it has none.

        Raises:
            MemoryLost: on all ranks, if one has an error.
        """
        if not self.possible or not any_rank(bool(found), self._context):
            return
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        told = all_gather_objects(found, self._context.world_group)
        rank = next(rank for rank, text in enumerate(told) if text)
        raise MemoryLost(f"rank {rank}: {told[rank]}")
