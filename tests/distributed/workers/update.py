"""PPO updates of actor and critic on fixed samples in one layout; writes what came out.

The samples are made from a seed for the whole world and each DP rank takes its share as in
training, so the result must not depend on the layout. Collectives are counted on the way.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megappo.config import load
from megappo.data.sampler import rank_share
from megappo.distributed import parallel
from megappo.distributed.metrics import Tally, reduce_tally
from megappo.models.hf_export import export_hf
from megappo.ppo.kl import AdaptiveKLController
from megappo.trainer.build import build_roles, make_corrector
from megappo.trainer.estimate import Estimator, make_estimator
from megappo.trainer.preflight import preflight
from megappo.types import Completion, MiniBatch, Prompt, RolloutBatch, collate

PROMPTS, N, MINI = 8, 2, 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    config = load(arguments.config, arguments.overrides)
    launch = parallel.LaunchEnvironment.read()
    found = preflight(config, launch.world_size)
    degrees = parallel.Degrees.of(config.parallel)
    context = parallel.start(launch, degrees, device="cpu", seed=1, timeout_s=300)
    specs = {
        "actor": found.actor_spec,
        "critic": found.critic_spec,
        "reference": found.reference_spec,
    }
    actor, critic, reference = build_roles(config, specs, context, total_optimizer_steps=16)
    batch = share(whole_batch(found.actor_spec.vocab_size), context)
    micro = [list(range(i, i + 2)) for i in range(0, len(batch), 2)]
    old, entropy = actor.log_probs(batch, micro)
    values, after = critic.values(batch, micro)
    assert reference is not None
    ref, _ = reference.log_probs(batch, micro)
    batch = batch.with_fields(
        old_log_probs=old,
        rollout_log_probs=old + 0.3 * made_up(torch.zeros_like(old), batch),
        values=made_up(values, batch),
        ref_log_probs=ref - 0.1,
    )
    corrector = make_corrector(config)
    if corrector is not None:
        batch = corrector.correct(batch)
    tally = Tally()
    tally.declare((*actor.means, *critic.means, *Estimator.MEANS), (*actor.MAXIMA, *critic.MAXIMA))
    controller = AdaptiveKLController(0.05, 0.02, 100.0)
    estimator = make_estimator(config.algorithm, controller, context)
    batch = estimator.estimate(batch, after, tally)
    norms: list[float] = []
    counts = {"first": count_collectives()}
    size = MINI * N // context.dp
    for number, start in enumerate(range(0, len(batch), size)):
        part = batch.select(range(start, start + size))
        mini = MiniBatch(samples=part, micro_batches=tuple((i, i + 1) for i in range(0, size, 2)))
        norms.append(critic.update(mini, tally))
        norms.append(actor.update(mini, tally, is_first=number == 0))
    metrics = reduce_tally(tally, context)
    weights = dict(export(actor.policy.network, "lm"))
    weights |= {f"critic.{k}": v for k, v in export(critic.network, "value").items()}
    new, _ = actor.log_probs(batch, micro)
    state = sum(
        t.numel()
        for trainable in (actor.trainable, critic.trainable)
        for s in optimizer_state(trainable)
        for t in s.values()
        if t.ndim
    )
    print(f"rank {context.rank} optimizer_elements {state}", flush=True)
    torch.save(
        {
            "old": old,
            "entropy": entropy,
            "values": values,
            "after": after,
            "new": new,
            "norms": norms,
            "metrics": dict(metrics),
            "weights": weights,
            "optimizer_elements": state,
            "collectives": dict(counts["first"]),
            "kl_coef": controller.kl_coef,
            "advantages": batch.advantages,
            "mask": batch.response_mask,
            "rollout": batch.rollout_log_probs,
            "rows": [p.row for p in batch.prompts],
            "parameters": sum(
                p.numel()
                for t in (actor.trainable, critic.trainable)
                for c in t.chunks
                for p in c.parameters()
            ),
        },
        arguments.out / f"rank{context.rank}.pt",
    )
    parallel.stop(context)


def whole_batch(vocab_size: int) -> RolloutBatch:
    """Uneven samples of all ranks; one is empty of trained tokens."""
    generator = torch.Generator().manual_seed(5)

    def ids(low: int, high: int) -> tuple[int, ...]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return tuple(torch.randint(3, vocab_size, (length,), generator=generator).tolist())

    prompts, completions = [], []
    for row in range(PROMPTS):
        prompt = Prompt(
            row=row, token_ids=ids(2, 9), data_source="d", ground_truth="", extra_info={}
        )
        for _ in range(N):
            tokens = ids(1, 8)
            prompts.append(prompt)
            completions.append(
                Completion(
                    token_ids=tokens,
                    log_probs=(-1.0,) * len(tokens),
                    finish_reason="stop",
                    text="",
                )
            )
    batch = collate(prompts, completions)
    shape = batch.responses.shape
    mask = batch.response_mask.clone()
    mask[3] = False
    scores = torch.randn(shape[0], generator=generator)
    return replace(batch, response_mask=mask, scores=scores)


def made_up(values: torch.Tensor, batch: RolloutBatch) -> torch.Tensor:
    """Values of 0, as a new critic's are, plus some that depend on the sample alone."""
    rows = torch.tensor(
        [len(c.token_ids) + p.row for p, c in zip(batch.prompts, batch.completions, strict=True)]
    )
    return values + torch.sin(rows[:, None] + torch.arange(values.shape[1])).float()


def share(batch: RolloutBatch, context: parallel.ParallelContext) -> RolloutBatch:
    """This DP rank's samples, prompt by prompt as `rank_share` deals them."""
    prompts = rank_share(
        list(range(PROMPTS)), mini_batch_size=MINI, dp_rank=context.dp_rank, dp_size=context.dp
    )
    return batch.select([p * N + k for p in prompts for k in range(N)])


def export(network: Any, head: Any) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in export_hf(network.chunks, network.spec, head=head)}


def optimizer_state(trainable: Any) -> list[dict[str, torch.Tensor]]:
    return list(trainable.optimizer.optimizer.state.values())


def count_collectives() -> Counter[str]:
    """Counts calls and bytes of Megatron's gradient and parameter collectives from here on."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    found: Counter[str] = Counter()

    def counting(name: str, real: Any) -> Any:
        def call(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            source = args[0] if args else kwargs["input"]
            found[f"{name}_bytes"] += source.numel() * source.element_size()
            return real(output, *args, **kwargs)

        return call

    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        real = getattr(buffers, name)
        setattr(buffers, name, counting(name, real))
    return found


if __name__ == "__main__":
    main()
