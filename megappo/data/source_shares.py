"""Prompts drawn by data source, in given shares: `data.source_weights`.

Each draw of the run goes to one source, so that after any number of draws every source has been
drawn within one of its exact share (Tijdeman 1980, "The chairman assignment problem": of the
sources that are behind, the one whose deadline is nearest). Shares are therefore right in every
step and mini-batch, not only on average. Each source is walked through in an order of its own,
which starts anew when fewer of its rows are left than the batch needs: no batch has a row twice.
An epoch is as many batches as fit into the rows that can be drawn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from megappo.data.sampler import check_size, check_state
from megappo.errors import CheckpointError, DataError, UserError


class SourceSampler:
    """Batches of positions with a fixed share of each data source; see `sampler.Sampler`.

    Pass p of source s, the s-th by name of those with a weight, is permuted by PCG64 seeded with
    `SeedSequence([seed, p, s])`, and is in file order without `shuffle`.
    """

    def __init__(
        self,
        sources: Sequence[str],
        *,
        weights: Mapping[str, float],
        batch_size: int,
        seed: int,
        shuffle: bool,
        num_dropped: int = 0,
    ) -> None:
        """Fixes the order; nothing is read.

        Args:
            sources: data source of each usable row, equal on all ranks.
            weights: relative, 0 or more; a source that is not named has 1.
            batch_size: prompts a step, over all ranks.
            seed: 0 or more.
            shuffle: permute each pass over a source.
            num_dropped: rows that were left out as too long, named in the error.

        Raises:
            DataError: too few rows, of all sources or of one, for a batch.
            UserError: an unknown source, no source with a weight, or impossible sizes.
        """
        rows: dict[str, list[int]] = {name: [] for name in sorted(set(sources))}
        for position, name in enumerate(sources):
            rows[name].append(position)
        full = _full_weights(weights, list(rows))
        self.names = [name for name in rows if full[name]]
        """sources that are drawn, sorted"""
        self._rows = [rows[name] for name in self.names]
        self.num_rows = sum(len(own) for own in self._rows)
        """Rows that can be drawn."""
        check_size(self.num_rows, batch_size, seed, num_dropped)
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self._weights = full
        self._shares = _shares([full[name] for name in self.names])
        self._slack = max(1, 2 * len(self.names) - 2)
        self._check_sizes()
        self._num_batches = 0
        self._drawn = [0] * len(self.names)
        self._passes = [0] * len(self.names)
        self._positions = [0] * len(self.names)
        self._orders = [self._order(s, 0) for s in range(len(self.names))]

    @property
    def batches_per_epoch(self) -> int:
        """As many as fit into the rows that can be drawn."""
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
        return f"{self.batches_per_epoch * self.batch_size} prompts drawn by data.source_weights"

    def metrics(self) -> dict[str, float]:
        """None of its own; shares are counted where prompts are answered."""
        return {}

    def next_batch(self) -> tuple[int, list[int]]:
        """The epoch and the positions of the next whole batch, in the order of training."""
        chosen = self._choose()
        for source, count in Counter(chosen).items():
            if self._positions[source] + count > len(self._rows[source]):
                self._passes[source] += 1
                self._positions[source] = 0
                self._orders[source] = self._order(source, self._passes[source])
        batch = []
        for source in chosen:
            batch.append(self._orders[source][self._positions[source]])
            self._positions[source] += 1
        self._num_batches += 1
        return self.epoch, batch

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: what is next, and what the order was made from."""
        return {
            "num_batches": self._num_batches,
            "drawn": list(self._drawn),
            "passes": list(self._passes),
            "positions": list(self._positions),
            **self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after the last batch that the saved sampler gave.

        Raises:
            CheckpointError: the state is incomplete, impossible, or belongs to another order.
        """
        check_state(state, self._identity(), ("num_batches", "drawn", "passes", "positions"))
        batches = int(state["num_batches"])
        drawn, passes, positions = (
            [int(n) for n in state[key]] for key in ("drawn", "passes", "positions")
        )
        fits = all(
            len(numbers) == len(self.names) and min(numbers) >= 0
            for numbers in (drawn, passes, positions)
        )
        if not (
            fits
            and sum(drawn) == batches * self.batch_size
            and all(p <= len(own) for p, own in zip(positions, self._rows, strict=True))
        ):
            raise CheckpointError(
                f"the sampler state has {batches} batches of {self.batch_size}, drawn {drawn}, "
                f"passes {passes} and positions {positions} for the sources {self.names}, which "
                "cannot be; choose another checkpoint"
            )
        self._num_batches, self._drawn = batches, drawn
        self._passes, self._positions = passes, positions
        self._orders = [self._order(s, p) for s, p in enumerate(passes)]

    def _identity(self) -> dict[str, Any]:
        return {
            "kind": "source_weights",
            "num_rows": self.num_rows,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "source_weights": dict(self._weights),
        }

    def _choose(self) -> list[int]:
        """The source of each draw of a batch; moves on.

        With K = 2 * sources - 2, share w / W and n draws so far, a source may have draw number j if
        j * w / W - n >= 1 / K, and must have it by (n + 1 - 1 / K) * W / w. Whole numbers only, so
        that no rounding adds up.
        """
        slack, shares, drawn = self._slack, self._shares, self._drawn
        total, number = sum(shares), self._num_batches * self.batch_size
        deadlines = [self._deadline(source) for source in range(len(shares))]
        chosen = []
        for draw in range(number + 1, number + self.batch_size + 1):
            _, source = min(
                (deadlines[s], s)
                for s, share in enumerate(shares)
                if (draw * share - drawn[s] * total) * slack >= total
            )
            drawn[source] += 1
            deadlines[source] = self._deadline(source)
            chosen.append(source)
        return chosen

    def _deadline(self, source: int) -> Fraction:
        """Up to a factor that all sources have in common."""
        return Fraction(self._slack * (self._drawn[source] + 1) - 1, self._shares[source])

    def _check_sizes(self) -> None:
        total = sum(self._shares)
        for name, share, own in zip(self.names, self._shares, self._rows, strict=True):
            exact = Fraction(share * self.batch_size, total)
            # Else a batch begins and ends with up to 1 - 1 / slack too few or too many.
            most = exact if exact.denominator == 1 else exact + 2 - Fraction(2, self._slack)
            if len(own) < math.floor(most):
                raise DataError(
                    f"data_source {name} has {len(own)} usable rows, and data.source_weights "
                    f"gives it {float(exact):.4g} of a step's {self.batch_size} prompts, so up to "
                    f"{math.floor(most)}: a step does not draw a row twice; lower its weight or "
                    "data.train_batch_size, or add rows"
                )

    def _order(self, source: int, number: int) -> Sequence[int]:
        own = self._rows[source]
        if not self.shuffle:
            return own
        seeds = np.random.SeedSequence([self.seed, number, source])
        order = np.random.Generator(np.random.PCG64(seeds)).permutation(len(own))
        return [own[i] for i in order.tolist()]


def _full_weights(weights: Mapping[str, float], known: Sequence[str]) -> dict[str, float]:
    """Every source's weight.

    Raises:
        UserError: a name that no row has, or no weight over 0.
    """
    unknown = sorted(set(weights) - set(known))
    if unknown:
        raise UserError(
            f"data.source_weights names {', '.join(map(repr, unknown))}, which no row of "
            f"data.train_files has as data_source; known: {', '.join(known)}"
        )
    full = {name: float(weights.get(name, 1.0)) for name in known}
    if not any(full.values()):
        raise UserError(
            f"data.source_weights is {dict(weights)}: it leaves out every data_source "
            f"({', '.join(known)}); give one of them a weight over 0"
        )
    return full


def _shares(weights: Sequence[float]) -> list[int]:
    """The same ratios in smallest whole numbers, of the decimals as they are written."""
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    common = math.gcd(*whole)
    return [number // common for number in whole]
