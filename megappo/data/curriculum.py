"""Prompts drawn by their scores so far: `data.curriculum=score`.

Rows without a score come first, so each is drawn once before any comes again. Then a row's chance
falls with the distance of its score, a running mean, from a target: what is always solved, or
never, teaches little. A floor keeps every row in the draw, as its score may be an old one.
Left out: an estimate of learning progress; it needs many more scores a row than a run has.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megappo.data.sampler import check_size, check_state
from megappo.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Preference:
    """Which scores are wanted."""

    target: float
    """the score that is drawn most"""
    width: float
    """distance from the target at which a row has the floor's chance"""
    floor: float
    """least chance of a row, relative to one at the target; over 0"""
    smoothing: float
    """part of the latest score in a row's running mean, in (0, 1]"""

    def weights(self, scores: NDArray[np.float32]) -> NDArray[np.float64]:
        """Relative chances: max(floor, 1 - |score - target| / width)."""
        distance = np.abs(scores.astype(np.float64) - self.target)
        return np.maximum(self.floor, 1.0 - distance / self.width)


class CurriculumSampler:
    """Batches of positions by score, no row twice in one; see `sampler.Sampler`.

    Batch b is drawn by PCG64 seeded with `SeedSequence([seed, b])`, from the scores that `observe`
    was told of until then. Only exact operations follow the generator's exponentials, so all ranks
    draw the same. An epoch is as many batches as fit into the rows.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool,
        preference: Preference,
        num_dropped: int = 0,
    ) -> None:
        """Begins without scores.

        Args:
            num_rows: usable rows, equal on all ranks.
            batch_size: prompts a step, over all ranks.
            seed: 0 or more.
            shuffle: rows without a score come in random order, else in that of the files.
            preference: which scores are wanted.
            num_dropped: rows that were left out as too long, named in the error.

        Raises:
            DataError: fewer rows than one batch.
            UserError: a batch size below 1 or a negative seed.
        """
        check_size(num_rows, batch_size, seed, num_dropped)
        self.num_rows, self.batch_size = num_rows, batch_size
        self.seed, self.shuffle = seed, shuffle
        self.preference = preference
        self._num_batches = 0
        self._scores = np.full(num_rows, np.nan, dtype=np.float32)

    @property
    def batches_per_epoch(self) -> int:
        """As many as fit into the rows."""
        return self.num_rows // self.batch_size

    @property
    def epoch(self) -> int:
        """Epoch of the latest batch; 0 before the first."""
        return max(0, self._num_batches - 1) // self.batches_per_epoch

    @property
    def is_at_end(self) -> bool:
        """Whether the latest batch was the last of its epoch."""
        return self._num_batches > 0 and self._num_batches % self.batches_per_epoch == 0

    def epoch_in_words(self) -> str:
        """What an epoch drew."""
        return f"{self.batches_per_epoch * self.batch_size} prompts drawn by data.curriculum"

    def metrics(self) -> dict[str, float]:
        """Rows without a score, and the mean of all other rows' running means."""
        seen = self._scores[~np.isnan(self._scores)]
        found = {"sampling/unseen_rows": float(self.num_rows - len(seen))}
        if len(seen):
            found["sampling/curriculum_mean_score"] = float(seen.mean(dtype=np.float64))
        return found

    def next_batch(self) -> tuple[int, list[int]]:
        """The epoch and the positions of the next whole batch, in the order of training."""
        seeds = np.random.SeedSequence([self.seed, self._num_batches])
        waits = np.random.Generator(np.random.PCG64(seeds)).standard_exponential(self.num_rows)
        is_unseen = np.isnan(self._scores)
        unseen, seen = np.flatnonzero(is_unseen), np.flatnonzero(~is_unseen)
        if self.shuffle:
            unseen = unseen[np.argsort(waits[unseen], kind="stable")]
        # The first of waiting times with these rates are a weighted draw without replacement.
        waits = waits[seen] / self.preference.weights(self._scores[seen])
        seen = seen[np.argsort(waits, kind="stable")]
        batch: list[int] = np.concatenate([unseen, seen])[: self.batch_size].tolist()
        self._num_batches += 1
        return self.epoch, batch

    def observe(self, rows: Sequence[int], scores: Sequence[float]) -> None:
        """Takes in the scores of a batch; all ranks must call it alike.

        Args:
            rows: positions, each once.
            scores: of each, the mean over its responses. One that is not finite, which is for
                guards to judge, leaves its row as it was.
        """
        where, new = np.asarray(rows, dtype=np.int64), np.asarray(scores, dtype=np.float64)
        assert len(set(rows)) == len(new), "one score for each row"
        where, new = where[np.isfinite(new)], new[np.isfinite(new)]
        old = self._scores[where].astype(np.float64)
        mean = old + self.preference.smoothing * (new - old)
        self._scores[where] = np.where(np.isnan(old), new, mean).astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        """Plain values: what is next, and every score, of which the unseen take no room."""
        packed = zlib.compress(self._scores.astype("<f4").tobytes(), level=1)
        return {
            "num_batches": self._num_batches,
            "scores": base64.b64encode(packed).decode("ascii"),
            **self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the last batch that the saved sampler gave, with its scores.

        Raises:
            CheckpointError: the state is incomplete, damaged, or belongs to other rows.
        """
        check_state(state, self._identity(), ("num_batches", "scores"))
        try:
            packed = base64.b64decode(state["scores"], validate=True)
            scores = np.frombuffer(zlib.decompress(packed), dtype="<f4").astype(np.float32)
        except (TypeError, ValueError, zlib.error) as error:
            raise CheckpointError(
                f"the sampler state has scores that cannot be read ({error}); choose another "
                "checkpoint"
            ) from error
        batches = int(state["num_batches"])
        if len(scores) != self.num_rows or batches < 0:
            raise CheckpointError(
                f"the sampler state has {batches} batches and {len(scores)} scores for "
                f"{self.num_rows} rows; choose another checkpoint"
            )
        self._num_batches, self._scores = batches, scores

    def _identity(self) -> dict[str, Any]:
        """What must not change; the preference may, as it bears on later draws alone."""
        return {
            "kind": "curriculum",
            "num_rows": self.num_rows,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }
