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
    from megappo.config import Config
    from megappo.config.findings import Findings


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
    from megappo.config.checks import check_device_features
    from megappo.config.load import load_any, read, task_of
    from megappo.trainer.preflight import preflight

    if task_of(args.config, args.overrides) != "ppo":
        from megappo.trainer.supervised.check import check_supervised_run

        supervised = load_any(args.config, args.overrides)
        check_supervised_run(supervised, args.world_size, read_weights=not args.no_weights)
        sys.stdout.write(f"ok         {args.config}\n")
        return EXIT_DONE
    config, mistakes = read(args.config, args.overrides)
    if config.device != "auto":
        mistakes.add(*check_device_features(config, config.device, here=False))
    world_size, local_world_size = _ranks(args, config, mistakes)
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
    weights = "; weights were not looked at" if args.no_weights else ""
    sys.stdout.write(
        f"data       {len(found.train_set)} train rows, {found.total_steps} steps\n"
        f"ok         {args.config}{weights}\n"
    )
    return EXIT_DONE


def _ranks(args: argparse.Namespace, config: Config, found: Findings) -> tuple[int, int]:
    """Ranks in all and on each node."""
    layout, nodes = config.parallel, args.nodes
    if nodes < 1:
        raise UserError(f"--nodes is {nodes}: there is at least one")
    world_size = args.world_size
    if world_size is None:
        dense, experts = layout.tp * layout.cp, layout.expert_tp * layout.ep
        least = math.lcm(math.lcm(dense, experts) * layout.pp, config.rollout.tp)
        world_size = math.lcm(least, nodes)
    if world_size % nodes:
        found.add(
            f"--world-size is {world_size} and --nodes {nodes}: every node has as many ranks as "
            f"the others; give a multiple of {nodes}"
        )
        return world_size, world_size
    return world_size, world_size // nodes
