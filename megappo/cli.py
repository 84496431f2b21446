"""The `megappo` command: `check`, `doctor`, `plan`, `convert`, `report`, `data`, `train-*`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megappo.doctor import command as doctor_command
from megappo.errors import EXIT_DONE, EXIT_USAGE, UserError
from megappo.trainer import check_command

TRAIN_COMMANDS = {"train-rm": "rm", "train-sft": "sft"}
"""Commands that start ranks, and the `task` that they set whatever the config says."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code (2 for any mistake in the input)."""
    given = sys.argv[1:] if arguments is None else arguments
    if given and given[0] in TRAIN_COMMANDS:  # what follows is torchrun's and the run's own
        from megappo.launch import main as launch

        return launch(given[1:], fixed=[f"task={TRAIN_COMMANDS[given[0]]}"])
    parser = _parser(given)
    args, rest = parser.parse_known_args(arguments)
    # argparse takes key=value arguments in one place only; behind an option they are left over.
    strange = [r for r in rest if r.startswith("-") or "=" not in r or "overrides" not in args]
    if strange:
        parser.error(f"unrecognized arguments: {' '.join(strange)}")
    if rest:
        args.overrides += rest
    try:
        code: int = args.run(args)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    except OSError as error:  # a path that cannot be read or written
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    return code


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megappo", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    check = commands.add_parser("check", help="all that is wrong with a run, on any machine")
    check_command.add_arguments(check)

    doctor = commands.add_parser("doctor", help="what this machine has, and lacks for a run")
    doctor_command.add_arguments(doctor)

    plan = commands.add_parser("plan", help="memory, traffic and time of a layout; or the best one")
    if "plan" in arguments[:1]:  # as below
        from megappo.trainer.plan_command import add_arguments as add_plan_arguments

        add_plan_arguments(plan)

    convert = commands.add_parser("convert", help="Hugging Face folders to Megatron and back")
    if "convert" in arguments[:1]:  # torch takes seconds to import, which the others do without
        from megappo.checkpoint.convert.command import add_arguments

        add_arguments(convert)

    report = commands.add_parser("report", help="a run, or several, as one HTML file")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    report.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="RUN_DIR/report.html of the first run if not given",
    )
    report.set_defaults(run=_report)

    for name, task in TRAIN_COMMANDS.items():
        commands.add_parser(
            name,
            help=f"train with task={task}: {name} [torchrun options] CONFIG.yaml [key=value ...]",
        )

    data = commands.add_parser("data", help="make Parquet files of prompts and preferences")
    kinds = data.add_subparsers(required=True, metavar="KIND")
    gsm8k = kinds.add_parser("gsm8k", help="GSM8K's JSON lines to Parquet")
    gsm8k.add_argument("input", type=Path, metavar="IN.jsonl")
    gsm8k.add_argument("output", type=Path, metavar="OUT.parquet")
    gsm8k.add_argument(
        "--split", default="", help="noted in each row; the input's name if not given"
    )
    gsm8k.set_defaults(run=_gsm8k)
    arithmetic = kinds.add_parser("arithmetic", help="seeded word problems for the quickstart")
    arithmetic.add_argument("output", type=Path, metavar="OUT_DIR")
    arithmetic.add_argument("--seed", type=int, default=0)
    arithmetic.add_argument("--num-train", type=int, default=8192)
    arithmetic.add_argument("--num-val", type=int, default=256)
    arithmetic.add_argument("--instruction", default="", help="put behind each question")
    arithmetic.set_defaults(run=_arithmetic)
    pairs = kinds.add_parser("preferences", help="right and wrong answers to such problems")
    pairs.add_argument("output", type=Path, metavar="OUT_DIR")
    pairs.add_argument("--seed", type=int, default=0)
    pairs.add_argument("--num-train", type=int, default=8192)
    pairs.add_argument("--num-val", type=int, default=512)
    pairs.set_defaults(run=_preferences)
    return parser


def _report(args: argparse.Namespace) -> int:
    from megappo.report.page import write_report

    output = args.output or args.runs[0] / "report.html"
    for note in write_report(args.runs, output):
        sys.stdout.write(f"note       {note}\n")
    size_mb = output.stat().st_size / 1e6
    sys.stdout.write(f"report     {output} ({size_mb:.1f} MB; open it in a browser)\n")
    return EXIT_DONE


def _gsm8k(args: argparse.Namespace) -> int:
    from megappo.data.gsm8k import convert

    rows = convert(args.input, args.output, split=args.split or args.input.stem)
    sys.stdout.write(f"{args.output}: {rows} rows\n")
    return EXIT_DONE


def _arithmetic(args: argparse.Namespace) -> int:
    from megappo.data.arithmetic import write_dataset

    write_dataset(
        args.output,
        seed=args.seed,
        num_train=args.num_train,
        num_val=args.num_val,
        instruction=args.instruction,
    )
    sys.stdout.write(f"{args.output}: {args.num_train} train and {args.num_val} validation rows\n")
    return EXIT_DONE


def _preferences(args: argparse.Namespace) -> int:
    from megappo.data.preferences import write_preferences

    counts = {"num_train": args.num_train, "num_val": args.num_val}
    write_preferences(args.output, seed=args.seed, **counts)
    sys.stdout.write(f"{args.output}: {args.num_train} train and {args.num_val} validation pairs\n")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
