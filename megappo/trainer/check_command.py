"""`megappo check`: everything that is wrong with a run, at once, on any machine.

megappo check CONFIG [key=value ...] [--world-size N] [--nodes N] [--no-weights]
megappo check --explain KEY

Nothing is written, no device is touched and no model is built. What this machine lacks for the run
(packages, memory, ports) is `megappo doctor`'s to say.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING

from megappo.errors import EXIT_DONE, UserError

if TYPE_CHECKING:
    from megappo.config import Config, SupervisedConfig
    from megappo.config.findings import Findings
    from megappo.config.layout import ParallelSection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("config", nargs="?", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument(
        "--world-size",
        type=int,
        help="ranks that will be started; as few as replicas (TP x PP x CP), engines (rollout.tp) "
        "and nodes allow if not given",
    )
    parser.add_argument("--nodes", type=int, default=1, help="that they are spread over evenly")
    parser.add_argument(
        "--no-weights",
        action="store_true",
        help="model folders need not hold weights: config.json and the tokenizer are enough",
    )
    parser.add_argument(
        "--explain",
        metavar="KEY",
        help="print type, default, rule, meaning and verl's name of a key (verl's name will do), "
        "or the keys of a section",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints what is right with a run.

    Raises:
        UserError: everything that is wrong with it.
    """
    if args.explain is not None:
        from megappo.config.explain import explain

        sys.stdout.write(explain(args.explain))
        return EXIT_DONE
    if args.config is None:
        raise UserError("megappo check needs CONFIG.yaml, or --explain KEY")
    from megappo.config import SupervisedConfig
    from megappo.config.load import read_any

    config, mistakes = read_any(args.config, args.overrides)
    weights = "; weights were not looked at" if args.no_weights else ""
    if isinstance(config, SupervisedConfig):
        _check_supervised(args, config, mistakes)
    else:
        _check_ppo(args, config, mistakes)
    sys.stdout.write(f"ok         {args.config}{weights}\n")
    return EXIT_DONE


def _check_supervised(
    args: argparse.Namespace, config: SupervisedConfig, mistakes: Findings
) -> None:
    from megappo.config.checks import check_cpu_features
    from megappo.trainer.supervised.check import check_supervised_run

    if config.device == "cpu":
        mistakes.add(*check_cpu_features(config.model, config.parallel))
    world_size, _ = _ranks(args, config.parallel, 1, mistakes)
    check_supervised_run(config, world_size, mistakes, read_weights=not args.no_weights)


def _check_ppo(args: argparse.Namespace, config: Config, mistakes: Findings) -> None:
    from megappo.config.checks import check_device_features
    from megappo.trainer.preflight import preflight

    if config.device != "auto":
        mistakes.add(*check_device_features(config, config.device, here=False))
    world_size, local_world_size = _ranks(args, config.parallel, config.rollout.tp, mistakes)
    found = preflight(
        config,
        world_size,
        local_world_size=local_world_size,
        read_weights=not args.no_weights,
        found=mistakes,
    )
    for line in found.plan.lines():
        sys.stdout.write(line + "\n")
    for change in found.changes:
        sys.stdout.write(f"changed    {change} (since {found.checkpoint})\n")
    for warning in found.warnings:
        sys.stdout.write(f"warning    {warning}\n")
    sys.stdout.write(f"data       {len(found.train_set)} train rows, {found.total_steps} steps\n")


def _ranks(
    args: argparse.Namespace, layout: ParallelSection, engine_ranks: int, found: Findings
) -> tuple[int, int]:
    """Ranks in all and on each node."""
    nodes = args.nodes
    if nodes < 1:
        raise UserError(f"--nodes is {nodes}: there is at least one")
    world_size = args.world_size
    if world_size is None:
        dense, experts = layout.tp * layout.cp, layout.expert_tp * layout.ep
        least = math.lcm(math.lcm(dense, experts) * layout.pp, engine_ranks)
        world_size = math.lcm(least, nodes)
    if world_size % nodes:
        found.add(
            f"--world-size is {world_size} and --nodes {nodes}: every node has as many ranks as "
            f"the others; give a multiple of {nodes}"
        )
        return world_size, world_size
    return world_size, world_size // nodes
