"""Whether a run is to stop, which ranks must find alike."""

from __future__ import annotations

from megappo.distributed.parallel import ParallelContext, all_gather_objects, any_rank


def stop_agreed(mine: str, context: ParallelContext) -> str:
    """Why the run is to stop, if any rank was asked to. Collective over the world.

    Args:
        mine: why this rank should; empty if it was not asked. Once asked, a rank stays so.
        context: of this rank.
    """
    if not any_rank(bool(mine), context):
        return ""
    reasons: list[str] = all_gather_objects(mine, context.world_group)
    return next(filter(None, reasons))
