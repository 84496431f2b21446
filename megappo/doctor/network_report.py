"""`megappo doctor --network`: measures under torchrun, and rank 0 says what is slow."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from megappo.config.batch_plan import check_world_size
from megappo.config.layout import ParallelSection
from megappo.config.load import read_any
from megappo.distributed import network, parallel
from megappo.distributed.environment import LaunchEnvironment
from megappo.distributed.launcher_death import die_with_launcher
from megappo.distributed.network import Network
from megappo.distributed.node_network import choose_gloo_interface
from megappo.distributed.parallel import Degrees
from megappo.errors import EXIT_DONE, UserError


def report(args: argparse.Namespace) -> int:
    """Joins the ranks, measures, prints. Collective over the world.

    Raises:
        UserError: a mistake in the config, a world that its layout does not divide, or a device or
            network that is not there.
    """
    launch = LaunchEnvironment.read()
    die_with_launcher()
    config, mistakes = read_any(args.config, args.overrides)
    mistakes.raise_any()
    device = parallel.resolve_device(config.device)
    parallel.check_device(device, launch)
    _check_world(config.parallel, launch.world_size)
    if launch.num_nodes > 1:  # as in a run
        choose_gloo_interface(launch.address)
    context = parallel.start(
        launch,
        Degrees.of(config.parallel),
        device=device,
        seed=config.trainer.seed,
        timeout_s=config.trainer.distributed_timeout_s,
    )
    found = network.measure(context, num_bytes=round(args.megabytes * 2**20))
    if context.is_main:
        sys.stdout.write(_json(found) if args.json else text(found))
        sys.stdout.flush()
    parallel.stop(context)
    return EXIT_DONE


def _check_world(layout: ParallelSection, world_size: int) -> None:
    if world_size < 2:
        raise UserError(
            "megappo doctor --network measures between ranks and there is 1: start it with "
            "torchrun --nproc-per-node N -m megappo.cli doctor --network CONFIG"
        )
    if problems := check_world_size(layout, world_size):
        raise UserError("\n".join(problems))


def _json(found: Network) -> str:
    values = asdict(found) | {
        "slow_pairs": [pair.ranks for pair in found.slow_pairs()],
        "slow_rank": found.slow_rank(),
    }
    return json.dumps(values, indent=1) + "\n"


def text(found: Network) -> str:
    """The slowest group of each kind, then the pairs."""
    lines = [f"{'group':<9}{'collective':<16}{'latency us':>11}{'GB/s':>9}  slowest ranks"]
    lines += [
        f"{s.kind:<9}{s.collective:<16}{s.latency_us:>11,.0f}{s.bandwidth_gb_s:>9.2f}  "
        f"{', '.join(str(rank) for rank in s.ranks)}"
        for s in network.slowest_of_each(found.speeds)
    ]
    for same_host, where in ((True, "on one host"), (False, "between hosts")):
        typical = found.typical_s(same_host=same_host)
        if typical is not None:
            lines.append(
                f"pairs    {where}: {found.pair_bytes / 2**20:.1f} MiB both ways typically take "
                f"{typical * 1e3:.2f} ms ({found.pair_bytes / typical / 1e9:.2f} GB/s each way)"
            )
    slow = found.slow_pairs()
    lines += [
        f"slow     ranks {a} ({found.hosts[a]}) and {b} ({found.hosts[b]}): "
        f"{pair.seconds * 1e3:.2f} ms, {found.ratio(pair):.1f} times what is typical"
        for pair in slow[:8]
        for a, b in [pair.ranks]
    ]
    rank = found.slow_rank()
    if rank is not None:
        lines.append(
            f"slow     rank {rank} on {found.hosts[rank]} is in all of these pairs: look at that "
            "rank's device, process and network card"
        )
    elif slow:
        lines.append("slow     look at the cables, switches and NICs between these hosts")
    else:
        lines.append(f"ok       no pair takes {network.SLOW:g} times as long as is typical")
    return "\n".join(lines) + "\n"
