"""Rebalances made-up batches under several layouts of four ranks; writes what each rank got.

Every field of a sample is computed from its number, so the test can tell which sample each value
belongs to. Bytes of the collectives are counted on the way.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.data.sampler import rank_share
from megappo.distributed import parallel
from megappo.distributed.exchange import Parcel, exchange
from megappo.trainer.balance import Balancer
from megappo.types import Completion, Prompt, RolloutBatch

PROMPTS, N, MINI = 24, 2, 12
"""Two mini-batches of 24 samples."""
LONG = 400
REQUIRED = ("prompts", "completions", "responses", "response_mask", "rollout_log_probs")


def cost(n: int) -> float:
    return n * (100.0 + n)


def prompt_ids(row: int) -> tuple[int, ...]:
    return tuple(range(1000 * row, 1000 * row + 1 + row % 5))


def response_length(sample: int, lengths: str) -> int:
    """Sample 30, of the second mini-batch, is far longer than all others.

    With `equal` lengths it is prompt and response together that are equal.
    """
    if lengths == "equal":
        return 8 - len(prompt_ids(sample // N))
    return LONG if sample == 30 else 1 + sample * 7 % 13


def token_values(field: int, sample: int, n: int) -> Tensor:
    """[n] float32, exact: no two fields, samples or tokens share a value."""
    return field * 1024 + sample + torch.arange(n) / 512


def made_up(row: int, k: int, lengths: str) -> tuple[Prompt, Completion]:
    sample = row * N + k
    n = response_length(sample, lengths)
    prompt = Prompt(
        row=row,
        token_ids=prompt_ids(row),
        data_source="source",
        ground_truth="truth",
        extra_info={"row": row},
    )
    completion = Completion(
        token_ids=tuple(range(10_000 * sample, 10_000 * sample + n)),
        log_probs=tuple(token_values(0, sample, n).tolist()),
        finish_reason="length" if sample % 3 == 0 else "stop",
        text="text",
    )
    return prompt, completion


def made_up_batch(rows: Sequence[int], lengths: str) -> RolloutBatch:
    """All fields, also the optional ones, padded with values that must not travel."""
    pairs = [(row, k) for row in rows for k in range(N)]
    prompts, completions = zip(*(made_up(*pair, lengths) for pair in pairs), strict=True)
    width = max(len(c.token_ids) for c in completions) + 3
    numbers = [row * N + k for row, k in pairs]
    responses = torch.full((len(pairs), width), -1)
    mask = torch.ones(len(pairs), width, dtype=torch.bool)
    for b, completion in enumerate(completions):
        n = len(completion.token_ids)
        responses[b, :n] = torch.tensor(completion.token_ids)
        mask[b, :n] = (torch.arange(n) + numbers[b]) % 3 != 0
    optional = [f.name for f in fields(RolloutBatch) if f.name not in REQUIRED]
    filled = {}
    for number, name in enumerate(["rollout_log_probs", *optional]):
        value = torch.full((len(pairs), width), torch.nan)
        for b, completion in enumerate(completions):
            n = len(completion.token_ids)
            value[b, :n] = token_values(number, numbers[b], n)
        filled[name] = value
    filled["scores"] = torch.tensor(numbers, dtype=torch.float32) / 4
    return RolloutBatch(
        prompts=prompts,
        completions=completions,
        responses=responses,
        response_mask=mask,
        **filled,
    )


def share(context: parallel.ParallelContext, lengths: str) -> RolloutBatch:
    rows = rank_share(
        list(range(PROMPTS)), mini_batch_size=MINI, dp_rank=context.dp_rank, dp_size=context.dp
    )
    return made_up_batch(rows, lengths)


@contextmanager
def counted_bytes() -> Iterator[Counter[str]]:
    """Bytes that this rank receives from others, by collective."""
    found: Counter[str] = Counter()
    real_all_to_all, real_gather = dist.all_to_all_single, dist.all_gather_into_tensor

    def all_to_all(out: Tensor, sent: Tensor, *args: Any, group: Any) -> Any:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        own = args[0][rank] if args else out.numel() // size
        found["all_to_all"] += (out.numel() - own) * out.element_size()
        return real_all_to_all(out, sent, *args, group=group)

    def gather(out: Tensor, sent: Tensor, *, group: Any) -> Any:
        found["all_gather"] += (out.numel() - sent.numel()) * out.element_size()
        return real_gather(out, sent, group=group)

    dist.all_to_all_single, dist.all_gather_into_tensor = all_to_all, gather
    try:
        yield found
    finally:
        dist.all_to_all_single, dist.all_gather_into_tensor = real_all_to_all, real_gather


def rebalanced(context: parallel.ParallelContext, lengths: str) -> dict[str, Any]:
    balancer = Balancer(context=context, cost=cost, samples_per_mini_batch=MINI * N // context.dp)
    with counted_bytes() as received:
        batch, metrics = balancer.rebalance(share(context, lengths))
    return {
        "dp_rank": context.dp_rank,
        "prompts": [vars(p) for p in batch.prompts],
        "completions": [vars(c) for c in batch.completions],
        "tensors": {
            f.name: value
            for f in fields(batch)
            if isinstance(value := getattr(batch, f.name), Tensor)
        },
        "metrics": dict(metrics),
        "received": dict(received),
    }


def exchanged(context: parallel.ParallelContext) -> list[tuple[list[int], list[float]]]:
    """Rank s sends s * d integers 100 s + d and one float to the odd d; some parcels are empty."""
    me = context.rank
    outgoing = [
        Parcel(
            integers=torch.full((me * d,), 100 * me + d, dtype=torch.int64),
            floats=torch.full((d % 2,), me + d / 10),
        )
        for d in range(context.world_size)
    ]
    return [
        (parcel.integers.tolist(), parcel.floats.tolist())
        for parcel in exchange(outgoing, context.world_group)
    ]


def main() -> None:
    launch = parallel.LaunchEnvironment.read()
    degrees = parallel.Degrees(tp=2)
    dp2 = parallel.start(launch, degrees, device="cpu", seed=1, timeout_s=300)
    dp4 = replace(dp2, tp=1, tp_rank=0, dp=4, dp_rank=dp2.rank, data_group=dp2.world_group)
    alone = [dist.new_group([rank], backend="gloo") for rank in range(dp2.world_size)]
    dp1 = replace(dp2, tp=4, tp_rank=dp2.rank, dp=1, dp_rank=0, data_group=alone[dp2.rank])
    layouts = {"dp1": dp1, "dp2": dp2, "dp4": dp4}
    found = {
        f"{name}_{lengths}": rebalanced(context, lengths)
        for name, context in layouts.items()
        for lengths in ("uneven", "equal")
    }
    torch.save(
        {"layouts": found, "exchanged": exchanged(dp2)}, Path(sys.argv[1]) / f"rank{dp2.rank}.pt"
    )
    parallel.stop(dp2)


if __name__ == "__main__":
    main()
