"""Estimators, policy losses and dynamic sampling on fixed samples; writes what came out.

Siblings lie on different data-parallel ranks where there are several, and samples are masked in
part or wholly. No model is updated: the learning rate is 0.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from megappo.config import load
from megappo.distributed import parallel
from megappo.distributed.metrics import Tally, reduce_tally
from megappo.ppo.kl import FixedKLController
from megappo.roles.policy_losses import POLICY_LOSSES
from megappo.trainer.advantage_methods import METHODS
from megappo.trainer.build import build_roles
from megappo.trainer.estimate import make_estimator
from megappo.trainer.preflight import preflight
from megappo.types import MiniBatch, RolloutBatch
from tests.distributed.workers.dynamic_sampling import collect_all, collect_with_scores
from tests.distributed.workers.update import made_up, whole_batch


def share(batch: RolloutBatch, context: parallel.ParallelContext) -> list[int]:
    """Rows of this DP rank: every other one, so that the two siblings of a prompt are apart."""
    return list(range(context.dp_rank, len(batch), context.dp))


def main() -> None:
    config = load(sys.argv[1], sys.argv[3:])
    launch = parallel.LaunchEnvironment.read()
    found = preflight(config, launch.world_size)
    degrees = parallel.Degrees.of(config.parallel)
    context = parallel.start(launch, degrees, device="cpu", seed=1, timeout_s=300)
    whole = whole_batch(found.actor_spec.vocab_size)
    rows = share(whole, context)
    batch = whole.select(rows)
    width = torch.zeros(batch.responses.shape)
    batch = batch.with_fields(
        old_log_probs=width - 1.0,
        ref_log_probs=width - 1.0 - 0.2 * made_up(width, batch),
        values=made_up(width, batch),
        baselines=torch.tensor([float(p.row) / 4 for p in batch.prompts]),
    )
    advantages = {}
    for name in METHODS:
        settings = replace(
            config.algorithm, adv_estimator=name, use_kl_in_reward=True, gamma=1.0, lam=1.0
        )
        estimator = make_estimator(settings, FixedKLController(0.1), context)
        estimated = estimator.estimate(batch, torch.zeros(len(batch)), Tally())
        assert (estimated.returns is not None) == (name == "gae")
        advantages[name] = estimated.advantages

    specs = {"actor": found.actor_spec, "reference": found.reference_spec}
    actor, critic, _ = build_roles(config, specs, context, total_optimizer_steps=9)
    assert critic is None
    micro = [list(range(i, i + 2)) for i in range(0, len(batch), 2)]
    now, _ = actor.log_probs(batch, micro)
    batch = batch.with_fields(
        old_log_probs=now + 0.3 * made_up(width, batch), advantages=advantages["grpo"]
    )
    mini = MiniBatch(samples=batch, micro_batches=tuple(tuple(rows) for rows in micro))
    losses = {}
    for name in POLICY_LOSSES:
        one = replace(actor, policy_loss=POLICY_LOSSES[name](config.actor))
        tally = Tally()
        tally.declare(one.means, one.MAXIMA)
        norm = one.update(mini, tally, is_first=False)
        metrics = reduce_tally(tally, context)
        losses[name] = {"norm": norm, **{k: v for k, v in metrics.items() if k.startswith("actor")}}
    torch.save(
        {
            "rows": rows,
            "dynamic": collect_all(context),
            "curriculum": collect_with_scores(context),
            "advantages": advantages,
            "losses": losses,
            "samples": {"mask": batch.response_mask, "scores": batch.scores, "now": now,
                        "old": batch.old_log_probs},
            "prompts": [p.row for p in batch.prompts],
        },
        Path(sys.argv[2]) / f"rank{context.rank}.pt",
    )  # fmt: skip
    parallel.stop(context)


if __name__ == "__main__":
    main()
