"""Which prompts a step takes: an endless, resumable order over positions 0 .. num_rows - 1.

The order of an epoch follows from (seed, epoch) alone and every rank computes the same whole batch;
`rank_share` then picks a rank's part. A run therefore sees the same prompts, in the same
mini-batches, for every number of ranks. The incomplete batch at the end of an epoch is left out.
Other orders stand in `source_shares` and `curriculum`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from megappo.errors import CheckpointError, DataError, UserError

T = TypeVar("T")

PLAIN = "plain"
"""Kind of a `PromptSampler`'s state, which does not name it."""


class Sampler(Protocol):
    """An endless, resumable order of whole batches, the same on every rank."""

    @property
    def num_rows(self) -> int:
        """Rows that can be drawn."""

    @property
    def batch_size(self) -> int:
        """Prompts a step, over all ranks."""

    @property
    def epoch(self) -> int:
        """Epoch of the latest batch; 0 before the first."""

    @property
    def batches_per_epoch(self) -> int:
        """Full batches."""

    @property
    def is_at_end(self) -> bool:
        """Whether the latest batch was the last full one of its epoch."""

    def epoch_in_words(self) -> str:
        """What an epoch drew, when it is over."""

    def metrics(self) -> Mapping[str, float]:
        """Figures after a step, equal on all ranks."""

    def next_batch(self) -> tuple[int, list[int]]:
        """The epoch and the positions of the next whole batch, none of them twice."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values that later batches do not change."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the last batch that the saved sampler gave.

        Raises:
            CheckpointError: the state is incomplete or belongs to another order.
        """


class PromptSampler:
    """Batches of positions into the usable rows of a `PromptDataset`.

    Epoch e is permuted by numpy's PCG64 seeded with `SeedSequence([seed, e])`, and is in file order
    without `shuffle`. State is (epoch, position), so an epoch is resumed without replaying it.
    """

    def __init__(
        self, num_rows: int, *, batch_size: int, seed: int, shuffle: bool, num_dropped: int = 0
    ) -> None:
        """Fixes the order; nothing is read.

        Args:
            num_rows: usable rows, equal on all ranks.
            batch_size: prompts a step, over all ranks.
            seed: 0 or more.
            shuffle: permute each epoch.
            num_dropped: rows that were left out as too long, named in the error.

        Raises:
            DataError: fewer rows than one batch, which would make an epoch of no steps.
            UserError: a batch size below 1 or a negative seed.
        """
        check_size(num_rows, batch_size, seed, num_dropped)
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        """Epoch of the latest batch; 0 before the first."""
        self._position = 0
        self._order = self._epoch_order(0)

    @property
    def batches_per_epoch(self) -> int:
        """Full batches; `num_rows % batch_size` rows of each epoch are left out."""
        return self.num_rows // self.batch_size

    @property
    def is_at_end(self) -> bool:
        """Whether the latest batch was the last full one of its epoch."""
        return self._position + self.batch_size > self.num_rows

    def epoch_in_words(self) -> str:
        """What an epoch drew, and what it left out."""
        rows = self.batches_per_epoch * self.batch_size
        return f"{rows} rows drawn, {self.num_rows - rows} left out as no full batch"

    def metrics(self) -> dict[str, float]:
        """None; see `Sampler`."""
        return {}

    def next_batch(self) -> tuple[int, list[int]]:
        """The epoch and the positions of the next whole batch, in the order of training."""
        if self._position + self.batch_size > self.num_rows:
            self._seek(self.epoch + 1, 0)
        batch = self._order[self._position : self._position + self.batch_size]
        self._position += self.batch_size
        return self.epoch, batch

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: what is next, and what the order was made from."""
        return {"epoch": self.epoch, "position": self._position, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the last batch that the saved sampler gave.

        Raises:
            CheckpointError: the state is incomplete or belongs to another order.
        """
        check_state(state, self._identity(), ("epoch", "position"))
        epoch, position = int(state["epoch"]), int(state["position"])
        end = self.batches_per_epoch * self.batch_size
        if epoch < 0 or position % self.batch_size or not 0 <= position <= end:
            raise CheckpointError(
                f"the sampler state has epoch {epoch} and position {position}; position must be a "
                f"multiple of {self.batch_size} from 0 to {end}; choose another checkpoint"
            )
        self._seek(epoch, position)

    def _identity(self) -> dict[str, Any]:
        return {
            "num_rows": self.num_rows,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def _seek(self, epoch: int, position: int) -> None:
        if epoch != self.epoch:
            self._order = self._epoch_order(epoch)
        self.epoch, self._position = epoch, position

    def _epoch_order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_rows))
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
        order: list[int] = generator.permutation(self.num_rows).tolist()
        return order


def num_ended(sampler: Sampler) -> int:
    """Epochs whose last full batch was drawn."""
    return sampler.epoch + sampler.is_at_end


def check_size(num_rows: int, batch_size: int, seed: int, num_dropped: int) -> None:
    """What every order needs.

    Raises:
        DataError: fewer rows than one batch, which would make an epoch of no steps.
        UserError: a batch size below 1 or a negative seed.
    """
    if batch_size < 1 or seed < 0:
        raise UserError(
            f"batch_size must be at least 1 and seed at least 0, not batch_size={batch_size}, "
            f"seed={seed}; set data.train_batch_size and the seed so"
        )
    if num_rows < batch_size:
        raise DataError(
            f"an epoch must fill a batch, and {num_rows} < {batch_size}: "
            f"{num_rows + num_dropped} rows read, {num_dropped} dropped as too long, "
            f"{num_rows} left for a batch of {batch_size}; lower the batch size, add rows, or "
            "raise data.max_prompt_length"
        )


def check_state(
    state: Mapping[str, Any], identity: Mapping[str, Any], position: Sequence[str]
) -> None:
    """Whether a saved state is of the same order.

    Args:
        state: what was saved.
        identity: what the order is made from, which must not have changed.
        position: the keys that say what is next.

    Raises:
        CheckpointError: keys that are missing, or both values of those that differ.
    """
    before, now = (str(kept.get("kind", PLAIN)) for kept in (state, identity))
    if before != now:
        raise CheckpointError(
            f"the checkpoint's prompts were drawn {_setting(before)}, and are drawn "
            f"{_setting(now)} now; set data.source_weights and data.curriculum back, or start a "
            "new run"
        )
    missing = [k for k in (*position, *identity) if k not in state]
    if missing:
        raise CheckpointError(
            f"the sampler state lacks {', '.join(missing)}; choose another checkpoint"
        )
    differing = [f"{k} {state[k]!r} -> {v!r}" for k, v in identity.items() if state[k] != v]
    if differing:
        raise CheckpointError(
            "a resumed run must draw the same prompts in the same order, and these changed "
            f"(checkpoint -> now): {', '.join(differing)}; restore them or start a new run"
        )


def _setting(kind: str) -> str:
    return "in a plain order" if kind == PLAIN else f"by data.{kind}"


def rank_share(
    batch_rows: Sequence[T], *, mini_batch_size: int, dp_rank: int, dp_size: int
) -> list[T]:
    """This rank's rows of a batch, mini-batch by mini-batch.

    Of each run of `mini_batch_size` rows, rank r takes the r-th contiguous chunk. So mini-batch m,
    all ranks together, holds the same prompts for every `dp_size`.

    Args:
        batch_rows: the whole batch.
        mini_batch_size: prompts an optimizer step, over all ranks.
        dp_rank: data-parallel rank, 0 .. dp_size - 1.
        dp_size: data-parallel size.

    Raises:
        UserError: mini-batches do not divide the batch, or ranks do not divide a mini-batch.
    """
    assert 0 <= dp_rank < dp_size, f"dp_rank {dp_rank} of {dp_size}"
    if mini_batch_size < 1 or len(batch_rows) % mini_batch_size or mini_batch_size % dp_size:
        raise UserError(
            "mini_batch_size must divide the batch and be divisible by the data-parallel size: "
            f"batch {len(batch_rows)}, mini_batch_size {mini_batch_size}, "
            f"data-parallel size {dp_size}; change one of them"
        )
    per_rank = mini_batch_size // dp_size
    starts = range(dp_rank * per_rank, len(batch_rows), mini_batch_size)
    return [row for start in starts for row in batch_rows[start : start + per_rank]]
