"""`megappo.train` with planted faults: faulty_train.py FAULTS CONFIG.yaml [key=value ...]

FAULTS is a JSON list of {"kind", "role", "rank", "update"}: on that rank, in the update of that
number (from 0, counted over the process's life, so that a repeated step meets it once)

- "nan": the loss becomes NaN;
- "spike": the loss, and so the gradient, is 10^5 times as large;
- "kl": the metric actor/ppo_kl is 10 nats larger, on every rank;
- "memory": PyTorch finds no memory;
- "error": an exception;
- "stop": SIGSTOP: the process answers nobody any more;
- "disk full": all that is left of the disk of RUN_DIR, which must be a mount of its own, is taken;
- "disk freed": it is given back;
- "slow score": thirty seconds pass in the scoring of the step of that number (role "scorer").

Faults may have {"life": n}: only after n restarts by torchrun. What each update did to this rank's
weights is noted in RUN_DIR/updates_RANK.jsonl, unless the disk gets full.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from megappo.train import main

BALLAST = "ballast"


def install(faults: list[dict[str, object]], rank: int, run_dir: Path) -> None:
    """Puts roles that fail as planned in the place where the trainer takes its own from."""
    import torch

    from megappo.trainer import build

    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    counts = {"actor": 0, "critic": 0, "scorer": 1}
    faults = [fault for fault in faults if fault.get("life", 0) == life]
    fills_disk = any(fault["kind"] == "disk full" for fault in faults)

    def planned(role: str, update: int) -> str | None:
        for fault in faults:
            if (fault["role"], fault["update"]) == (role, update) and (
                fault["rank"] == rank or fault["kind"] == "kl"
            ):
                return str(fault["kind"])
        return None

    def disturbed(loss, kind: str | None):
        if kind == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. (planted)")
        if kind == "error":
            raise RuntimeError("a planted error")
        if kind == "disk full" and not (run_dir / BALLAST).exists():
            fill(run_dir)
        if kind == "disk freed":
            (run_dir / BALLAST).unlink(missing_ok=True)  # there are several passes an update
        if kind == "stop":
            time.sleep(2)  # the watchdog's thread has told the phase by then
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "kl":
            total, count = loss.tally.sums["actor/ppo_kl"]
            loss.tally.sums["actor/ppo_kl"] = (total + 10.0 * count, count)
        factor = {"nan": float("nan"), "spike": 1e5}.get(kind or "", 1.0)
        return dataclasses.replace(loss, total=loss.total * factor)

    def faulty(cls, role: str):
        class Faulty(cls):
            def update(self, mini, tally, **settings):
                before = weights_hash(self.trainable)
                number = counts[role]
                try:
                    norm = super().update(mini, tally, **settings)
                finally:
                    counts[role] += 1
                note = {
                    "role": role,
                    "update": number,
                    "norm": norm,
                    "before": before,
                    "after": weights_hash(self.trainable),
                    "lr": self.trainable.lr,
                    "steps": self.trainable.scheduler.num_steps,
                    "passes": len(mini.micro_batches),
                }
                if not fills_disk:
                    with (run_dir / f"updates_{rank}.jsonl").open("a") as file:
                        file.write(json.dumps(note) + "\n")
                return norm

            def _loss(self, *args):
                return disturbed(super()._loss(*args), planned(role, counts[role]))

        return Faulty

    class SlowScorer(build.BatchScorer):
        def score(self, batch, mine, tally, *overlap):
            if planned("scorer", counts["scorer"]) is not None:
                (run_dir / f"scoring_{rank}").touch()
                time.sleep(30)
            counts["scorer"] += 1
            return super().score(batch, mine, tally, *overlap)

    def weights_hash(trainable) -> str:
        trainable.settle()
        digest = hashlib.sha256()
        for chunk in trainable.chunks:
            for parameter in chunk.parameters():
                # A copy: what numpy shares memory with cannot be offloaded any more.
                digest.update(parameter.detach().cpu().clone().numpy().tobytes())
        return digest.hexdigest()

    build.BatchScorer = SlowScorer
    build.Actor = faulty(build.Actor, "actor")
    build.Critic = faulty(build.Critic, "critic")


def fill(folder: Path) -> None:
    """Takes the whole disk that is mounted there, to the last byte."""
    assert folder.is_mount(), f"{folder} is no disk of its own"
    with (folder / BALLAST).open("wb", buffering=0) as file:
        for size in (2**16, 1):
            with contextlib.suppress(OSError):  # no space is left
                while True:
                    file.write(bytes(size))


if __name__ == "__main__":
    folder = next(a.partition("=")[2] for a in sys.argv if a.startswith("trainer.run_dir="))
    install(json.loads(sys.argv[1]), int(os.environ["RANK"]), Path(folder))
    code = main(sys.argv[2:])
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
