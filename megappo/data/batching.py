"""Which samples share a forward pass, and which go to which rank: plans over lengths alone.

Micro-batches are packed by a token budget (`plan_micro_batches`) or by a fixed count
(`fixed_micro_batches`); `balance` deals samples out to ranks. All plans are deterministic, so ranks
that hold the same lengths agree without communication. Losses are divided by counts of the whole
mini-batch, so no plan changes a gradient: uneven and empty micro-batches are safe.

Left out: an exact packing of many samples. It is NP-hard, and the greedy plans below lose little.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Sequence

from megappo.errors import DataError, UserError


def plan_micro_batches(
    lengths: Sequence[int], *, max_tokens: int, num_micro_batches: int | None = None
) -> list[list[int]]:
    """Packs samples so that no micro-batch holds more than `max_tokens` tokens.

    Every index appears once. Micro-batches have near-equal tokens and come heaviest first: a step
    that does not fit in memory fails at once, and data-parallel ranks meet like with like. Inside
    one, indices ascend.

    Without `num_micro_batches` few are made, k say. Any number >= k is then also accepted for the
    same lengths, so that ranks may plan alone, agree on the largest k, and plan again with it.

    Args:
        lengths: tokens of each sample.
        max_tokens: budget of one forward pass on one rank, tokens.
        num_micro_batches: exactly so many lists; some stay empty when there are too few samples.

    Raises:
        DataError: one sample is longer than the budget, or no packing into `num_micro_batches` was
            found, greedily or, for few samples, by a bounded search.
    """
    assert all(length >= 0 for length in lengths), "a length is negative"
    for i, length in enumerate(lengths):
        if length > max_tokens:
            raise DataError(
                f"a sample must fit in one micro-batch: sample {i} has {length} tokens, the budget "
                f"is {max_tokens}; raise max_token_len_per_gpu to {length} or more, or lower "
                "data.max_prompt_length or rollout.max_response_length"
            )
    plan = _fewest(lengths, max_tokens)
    if num_micro_batches is not None:
        plan = _widen(plan, lengths, max_tokens=max_tokens, num_parts=num_micro_batches)
    plan = [sorted(part) for part in plan]
    return sorted(plan, key=lambda part: (-_load(part, lengths), not part, part))


def fixed_micro_batches(num_samples: int, micro_batch_size: int) -> list[list[int]]:
    """Consecutive indices, `micro_batch_size` at a time; the last list takes what remains.

    Raises:
        UserError: `micro_batch_size` is below 1.
    """
    if micro_batch_size < 1:
        raise UserError(
            f"micro_batch_size must be at least 1, not {micro_batch_size}; "
            "set it to the samples of one forward pass on one rank"
        )
    starts = range(0, num_samples, micro_batch_size)
    return [list(range(s, min(s + micro_batch_size, num_samples))) for s in starts]


def balance(
    lengths: Sequence[int], num_parts: int, *, cost: Callable[[int], float] | None = None
) -> list[list[int]]:
    """Deals samples out to `num_parts` parts of equal count and near-equal summed cost.

    Balanced largest differencing (Karmarkar and Karp 1982; Michiels et al. 2003 for equal counts):
    samples are cut, longest first, into groups of one sample a part; the two groups whose parts
    differ most are merged, heaviest part onto lightest, until one is left. With few samples a part
    that leaves the heaviest some percent above the mean, so pairs of samples are then swapped
    between it and a light part while that helps.

    Args:
        lengths: tokens of each sample.
        num_parts: usually the data-parallel size; must divide `len(lengths)`.
        cost: length -> work of any unit. Default: the length itself, which is right while the
            matrix products outweigh attention; pass `lambda n: n * (c + n)` for long contexts.

    Returns:
        For each part its indices, ascending; the parts ordered by their first index.

    Raises:
        DataError: the samples cannot be dealt out in equal counts.
    """
    if num_parts < 1 or len(lengths) % num_parts:
        raise DataError(
            f"{len(lengths)} samples cannot be dealt out equally to {num_parts} parts; "
            "make train_batch_size x rollout.n a multiple of the data-parallel size"
        )
    costs = [float(length) if cost is None else cost(length) for length in lengths]
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    groups = [
        [(costs[i], [i]) for i in order[start : start + num_parts]]
        for start in range(0, len(order), num_parts)
    ]
    if not groups:
        return [[] for _ in range(num_parts)]
    parts = [indices for _, indices in _merge_groups(groups, num_parts)]
    _swap(parts, costs)
    return sorted(sorted(part) for part in parts)


SEARCH_SAMPLES = 24
"""Up to so many samples a tight packing is searched for where the greedy ones find none."""
SEARCH_STATES = 20_000
"""Dead ends after which that search gives up."""
LEVEL_ENOUGH = 1.001
"""Largest over mean cost at which parts are left alone: a thousandth of the time is noise."""
SWAPS_A_PART = 8
"""Bounds the time of planning; fewer are needed as a rule."""

_Part = tuple[float, list[int]]
"""Summed cost and indices."""


def _merge_groups(groups: list[list[_Part]], num_parts: int) -> list[_Part]:
    """Largest differencing; a group is up to `num_parts` non-empty parts, heaviest first."""

    def spread(group: list[_Part]) -> float:
        return group[0][0] - (group[-1][0] if len(group) == num_parts else 0)

    # The serial number decides between equal spreads, so the parts themselves are never compared.
    heap = [(-spread(group), serial, group) for serial, group in enumerate(groups)]
    heapq.heapify(heap)
    serial = len(groups)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        merged = _merge(a, b, num_parts)
        heapq.heappush(heap, (-spread(merged), serial, merged))
        serial += 1
    return heap[0][2]


def _merge(a: list[_Part], b: list[_Part], num_parts: int) -> list[_Part]:
    """Part p of `a` joins part num_parts - 1 - p of `b`; those without a partner stay alone."""
    num_alone_a = max(0, num_parts - len(b))
    num_alone_b = max(0, num_parts - len(a))
    joined = [
        (x[0] + y[0], x[1] + y[1])
        for x, y in zip(a[num_alone_a:], reversed(b[num_alone_b:]), strict=True)
    ]
    merged = a[:num_alone_a] + joined + b[:num_alone_b]
    return sorted(merged, key=lambda part: (-part[0], part[1]))


def _swap(parts: list[list[int]], costs: Sequence[float]) -> None:
    """Levels parts in place: pairs are swapped between the heaviest and the lightest that can."""
    loads = [sum(costs[i] for i in part) for part in parts]
    enough = LEVEL_ENOUGH * sum(loads) / len(loads)
    for _ in range(SWAPS_A_PART * len(parts)):
        heavy = max(range(len(parts)), key=lambda p: loads[p])
        if loads[heavy] <= enough:
            return
        for light in sorted(range(len(parts)), key=lambda p: loads[p]):
            pair = _best_pair(parts[heavy], parts[light], costs, loads[heavy] - loads[light])
            if pair is not None:
                break
        else:
            return
        h, k = pair
        parts[heavy][h], parts[light][k] = parts[light][k], parts[heavy][h]
        for p in (heavy, light):
            loads[p] = sum(costs[i] for i in parts[p])


def _best_pair(
    heavy: Sequence[int], light: Sequence[int], costs: Sequence[float], gap: float
) -> tuple[int, int] | None:
    """Places in the two parts whose swap levels them best; None if none lowers the heavier.

    A swap moves the difference d of two costs; both parts end between the old ones if 0 < d < gap.
    """
    ascending = sorted(range(len(light)), key=lambda k: costs[light[k]])
    values = [costs[light[k]] for k in ascending]
    best: tuple[float, int, int] | None = None
    for h, i in enumerate(heavy):
        wanted = costs[i] - gap / 2
        right = bisect.bisect_left(values, wanted)
        for place in range(max(0, right - 1), min(len(values), right + 1)):
            difference = costs[i] - values[place]
            found = (abs(difference - gap / 2), h, ascending[place])
            if 0 < difference < gap and (best is None or found < best):
                best = found
    return None if best is None else best[1:]


def _fewest(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Few parts within the budget, level where possible."""
    if not lengths:
        return []
    # First fit is tight but uneven; differencing is level but may overflow.
    tight = _first_fit(lengths, max_tokens)
    at_least = -(-sum(lengths) // max_tokens) if max_tokens else 1
    for num_parts in range(max(1, at_least), len(tight) + 1):
        level = _level(lengths, num_parts)
        if all(_load(part, lengths) <= max_tokens for part in level):
            return level
        if len(lengths) <= SEARCH_SAMPLES and num_parts < len(tight):
            found = _search(lengths, num_parts, max_tokens)
            if found is not None:
                return found
    return tight


def _widen(
    plan: list[list[int]], lengths: Sequence[int], *, max_tokens: int, num_parts: int
) -> list[list[int]]:
    """The plan for exactly `num_parts`, made afresh or, where that overflows, by splitting."""
    if num_parts < len(plan):
        raise DataError(
            f"{len(lengths)} samples of {sum(lengths)} tokens take {len(plan)} micro-batches of at "
            f"most {max_tokens} tokens, and only num_micro_batches={num_parts} were asked for; "
            "raise max_token_len_per_gpu or num_micro_batches"
        )
    level = _level(lengths, num_parts)
    if all(_load(part, lengths) <= max_tokens for part in level):
        return level
    parts = list(plan)
    while len(parts) < num_parts:
        widest = max(range(len(parts)), key=lambda p: (len(parts[p]) > 1, _load(parts[p], lengths)))
        whole = parts.pop(widest)
        halves = _level([lengths[i] for i in whole], 2)
        parts.extend([whole[j] for j in half] for half in halves)
    return parts


def _level(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Near-equal tokens in each of `num_parts` parts, whatever their counts; no budget."""
    groups = [[(float(lengths[i]), [i])] for i in _longest_first(lengths)]
    parts = [indices for _, indices in _merge_groups(groups, num_parts)] if groups else []
    return parts + [[] for _ in range(num_parts - len(parts))]


def _first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Longest sample first, each into the first part with room, else into a new one."""
    parts: list[list[int]] = []
    room: list[int] = []
    for i in _longest_first(lengths):
        p = next((p for p, free in enumerate(room) if lengths[i] <= free), len(parts))
        if p == len(parts):
            parts.append([])
            room.append(max_tokens)
        parts[p].append(i)
        room[p] -= lengths[i]
    return parts


def _search(lengths: Sequence[int], num_parts: int, max_tokens: int) -> list[list[int]] | None:
    """Depth-first: longest sample first, each into the fullest part with room, then the next."""
    order = _longest_first(lengths)
    loads = [0] * num_parts
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    failed: set[tuple[int, ...]] = set()

    def place(depth: int) -> bool:
        if depth == len(order):
            return True
        state = (depth, *sorted(loads))
        if state in failed or len(failed) >= SEARCH_STATES:
            return False
        i = order[depth]
        # Parts of one load are alike: one of them is enough.
        alike = {load: p for p, load in enumerate(loads) if load + lengths[i] <= max_tokens}
        for load in sorted(alike, reverse=True):
            p = alike[load]
            loads[p] += lengths[i]
            parts[p].append(i)
            if place(depth + 1):
                return True
            loads[p] -= lengths[i]
            parts[p].pop()
        failed.add(state)
        return False

    return parts if place(0) else None


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _load(part: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[i] for i in part)
