"""`megappo doctor`: arguments, what is printed, exit codes.

megappo doctor [CONFIG [key=value ...]] [--ranks N] [--json]
torchrun --nproc-per-node N -m megappo.cli doctor --network CONFIG [key=value ...]

Exit codes: 0 fine, 1 something that the config needs is missing here, 2 bad usage or config.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from megappo.errors import EXIT_DONE, EXIT_FAILED, UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("config", nargs="?", help="YAML file of a run that is to start here")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument(
        "--ranks", type=int, help="ranks on this machine; its GPUs, or 1, if not given"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--network",
        action="store_true",
        help="under torchrun: measure the collectives of each group, and every pair of ranks",
    )
    parser.add_argument(
        "--megabytes", type=float, default=16.0, help="of a measured message (default 16)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the findings; returns the exit code.

    Raises:
        UserError: a mistake in the arguments or the config.
    """
    if args.ranks is not None and args.ranks < 1:
        raise UserError(f"--ranks is {args.ranks}: there is at least one")
    if args.network:
        if args.config is None:
            raise UserError("megappo doctor --network needs CONFIG.yaml, whose groups it measures")
        if not 0 < args.megabytes < 2**16:
            raise UserError(f"--megabytes is {args.megabytes:g}: it must lie between 0 and 65536")
        from megappo.doctor.network_report import report

        return report(args)
    from megappo.config.load import read_any
    from megappo.doctor.machine import look
    from megappo.doctor.needs import needs

    config = None
    if args.config is not None:
        config, mistakes = read_any(args.config, args.overrides)
        mistakes.raise_any()
    machine = look(ranks=args.ranks)
    ranks = args.ranks or len(machine.gpus) or 1
    lines = [] if config is None else needs(config, machine, ranks=ranks)
    missing = [line for line in lines if line.state == "missing"]
    if args.json:
        found = {
            "machine": machine.as_json(),
            "needs": [asdict(line) for line in lines],
            "missing": [line.what for line in missing],
        }
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        from megappo.doctor.text import machine_text, needs_text

        sys.stdout.write(machine_text(machine))
        if config is not None:
            sys.stdout.write(needs_text(lines, config=args.config, ranks=ranks))
    return EXIT_FAILED if missing else EXIT_DONE
