"""Updates of a reward model and of fine-tuning in one layout; writes what came out.

Rows come from the files through the sampler, as in training. The first layout also saves and goes
on, compares scores with transformers, and scores samples as the reward model of PPO does.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megappo.checkpoint.layout import KeepPolicy
from megappo.checkpoint.store import CheckpointStore
from megappo.config import SupervisedConfig, load_any
from megappo.config.reward_model import RewardModelSection
from megappo.data.examples import as_samples
from megappo.distributed import parallel
from megappo.distributed.metrics import Tally, reduce_tally
from megappo.distributed.parallel import ParallelContext, all_gather_objects
from megappo.models.hf_export import export_hf, save_hf
from megappo.roles.reward_model import RewardModel
from megappo.trainer.build import build_model_scorer
from megappo.trainer.supervised.build import build_supervised
from megappo.trainer.supervised.preflight import scan_rows, supervised_preflight
from megappo.trainer.supervised.trainer import SupervisedTrainer

STEPS = 2
OWN = {"rm": ["data.margin_key=margin", "training.center_coef=0.05"], "sft": []}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    launch = parallel.LaunchEnvironment.read()
    configs = {}
    for task, own in OWN.items():
        loaded = load_any(arguments.config, [*arguments.overrides, f"task={task}", *own])
        assert isinstance(loaded, SupervisedConfig)
        configs[task] = loaded
    degrees = parallel.Degrees.of(configs["rm"].parallel)
    context = parallel.start(launch, degrees, device="cpu", seed=1, timeout_s=300)
    found = {task: learn(config, context) for task, config in configs.items()}
    trainer, found["rm"]["scores"] = scores(configs["rm"], context, arguments.out)
    found["rm"]["resumed"] = resume(configs["rm"], trainer, context, arguments.out)
    torch.save(found, arguments.out / f"rank{context.rank}.pt")
    parallel.stop(context)


def build(config: SupervisedConfig, context: ParallelContext) -> SupervisedTrainer:
    found = supervised_preflight(config, context.world_size)
    course = scan_rows(
        config, found, rank=context.rank, world_size=context.world_size,
        gather=lambda scan: all_gather_objects(scan, context.world_group),
    )  # fmt: skip
    trainer = build_supervised(config, found, course, context)
    if config.task == "rm":  # a new head is 0, and would score every answer alike
        for chunk in trainer.learner.network.chunks:
            if chunk.post_process:
                weight = chunk.output_layer.weight
                generator = torch.Generator().manual_seed(3)
                with torch.no_grad():
                    weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
        trainer.learner.trainable.optimizer.reload_model_params()
    return trainer


def learn(config: SupervisedConfig, context: ParallelContext) -> dict[str, Any]:
    trainer = build(config, context)
    metrics = [dict(trainer.validate())]
    metrics += [dict(trainer.step()) for _ in range(STEPS)]
    metrics.append(dict(trainer.validate()))
    return {"metrics": metrics, "weights": weights(trainer)}


def weights(trainer: SupervisedTrainer) -> dict[str, torch.Tensor]:
    learner = trainer.learner
    tensors = export_hf(learner.trainable.chunks, learner.network.spec, head=learner.objective.head)
    return {name: tensor.clone() for name, tensor in tensors}


def scores(
    config: SupervisedConfig, context: ParallelContext, out: Path
) -> tuple[SupervisedTrainer, dict[str, Any]]:
    """Of all validation answers: by the trained model, and by its export as PPO's reward model."""
    trainer = build(config, context)
    trainer.step()
    learner = trainer.learner
    folder = out / "rm_hf"
    save_hf(learner.trainable.chunks, learner.network.spec, config.model.path, folder, head="value")
    assert trainer.val_set is not None
    batch = as_samples(trainer.val_set.examples(range(len(trainer.val_set))))
    batch = batch.with_fields(scores=torch.ones(len(batch)))
    settings = RewardModelSection(
        path=str(folder), micro_batch_size=3, weight=2.0, rule_weight=0.5, param_offload=True
    )
    ppo = replace_reward_model(config, settings)
    scorer = build_model_scorer(ppo, learner.network.spec, context)
    assert scorer is not None
    assert isinstance(scorer.model, RewardModel)
    assert scorer.model.memory.is_away("params")
    tally = Tally()
    tally.declare(["reward/model/mean", "reward/rules/mean", "val/reward_model/mean"])
    total = scorer.add(batch, tally).scores
    # Ranks of a replica have different numbers of answers; those of DP repeat one another.
    mine = range(context.model_rank, len(batch), context.model_size)
    few = [i for i in mine if i < len(batch) - 1]
    scorer.validate([batch.prompts[i] for i in few], [batch.completions[i] for i in few], tally)
    assert scorer.model.memory.is_away("params")
    return trainer, {
        "total": total,
        "metrics": dict(reduce_tally(tally, context)),
        "folder": str(folder),
        "ids": [
            [*p.token_ids, *c.token_ids]
            for p, c in zip(batch.prompts, batch.completions, strict=True)
        ],
    }


def replace_reward_model(config: SupervisedConfig, settings: RewardModelSection) -> Any:
    """A PPO config of the same layout, with no more of it than the reward model needs."""
    from megappo.config import Config

    return Config(
        model=config.model,
        parallel=replace(config.parallel),
        reward_model=settings,
    )


def resume(
    config: SupervisedConfig, trainer: SupervisedTrainer, context: ParallelContext, out: Path
) -> dict[str, Any]:
    """A step after a save, and the same from the files in a new model."""
    store = CheckpointStore(
        folder=out / "checkpoints", policy=KeepPolicy(newest=1), context=context
    )
    state = {"sampler": trainer.sampler.state_dict()}
    saved = store.save(1, {"rm": trainer.learner.trainable}, state)
    went_on = dict(trainer.step())
    fresh = build(config, context)
    loaded = store.load(saved.path, {"rm": fresh.learner.trainable}, seed=1)
    fresh.sampler.load_state_dict(loaded["sampler"])
    again = dict(fresh.step())
    old, new = weights(trainer), weights(fresh)
    return {
        "equal": all(torch.equal(old[name], new[name]) for name in old),
        "norms": (went_on["rm/grad_norm"], again["rm/grad_norm"]),
        "losses": (went_on["rm/loss"], again["rm/loss"]),
    }


if __name__ == "__main__":
    main()
