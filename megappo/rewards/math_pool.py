"""Says whether two mathematical expressions are equal, in processes that are killed on time."""

from __future__ import annotations

import logging
import threading

from megappo.rewards.base import RewardTimeoutError
from megappo.rewards.worker_pool import Limits, OverLimitError, WorkerPool

_log = logging.getLogger(__name__)


class MathVerifier:
    """Says whether two expressions are equal, within a wall-clock limit; safe to use from threads.

    Processes start on first use and end with this object or the interpreter, whichever is first.
    """

    def __init__(self, *, timeout_s: float, num_workers: int = 2) -> None:
        """Starts nothing yet.

        Args:
            timeout_s: Wall-clock limit of one comparison; start-up and queueing do not count.
            num_workers: Comparisons at once, see `WorkerPool`.
        """
        self.timeout_s = timeout_s
        self.num_timeouts = 0
        self._lock = threading.Lock()
        self._pool = WorkerPool(
            "megappo.rewards.math_worker",
            limits=Limits(timeout_s=timeout_s),
            num_workers=num_workers,
        )

    def equal(self, answer: str, wanted: str) -> bool:
        """Whether math-verify holds `answer` equal to `wanted`.

        Raises:
            RewardTimeoutError: If the comparison ran out of time or memory.
            RuntimeError: If the process could not start, ended by itself or reported an error.
        """
        try:
            return bool(self._pool.ask({"answer": answer, "wanted": wanted})["equal"])
        except OverLimitError as error:
            self._count_timeout(answer)
            raise RewardTimeoutError(f"comparing {answer:.200} {error}") from error
        except RuntimeError as error:
            raise RuntimeError(f"math-verify failed on {answer:.200}: {error}") from error

    def close(self) -> None:
        """Ends the idle processes; a later comparison starts new ones."""
        self._pool.close()

    def _count_timeout(self, answer: str) -> None:
        with self._lock:
            self.num_timeouts += 1
            first = self.num_timeouts == 1
        if first:
            _log.warning(
                "gave up comparing the answer %.80r: over %s s or out of memory; it scores 0, and "
                "further ones are only counted",
                answer,
                self.timeout_s,
            )
