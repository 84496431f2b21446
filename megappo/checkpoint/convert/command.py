"""`megappo convert`: arguments, what is printed, exit codes. The work is done elsewhere.

megappo convert to-megatron HF_DIR OUT [--tp N --pp N --ep N]
megappo convert to-hf CHECKPOINT OUT --like HF_DIR
megappo convert verify A B [--logits]
megappo convert inspect PATH
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from megappo.checkpoint.convert import to_hf, to_megatron
from megappo.checkpoint.convert.file_layout import Layout
from megappo.checkpoint.convert.output import Progress, check_output, check_space, size_text
from megappo.checkpoint.convert.place import find_place
from megappo.errors import EXIT_DONE, EXIT_FAILED, CheckpointError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the four commands."""
    commands = parser.add_subparsers(required=True, metavar="WHAT")

    one = commands.add_parser("to-megatron", help="Hugging Face folder to torch_dist")
    one.add_argument("source", type=Path, metavar="HF_DIR")
    one.add_argument("out", type=Path, metavar="OUT")
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
        one.add_argument(
            f"--{name}",
            type=int,
            default=1,
            help=f"{what}-parallel ranks that the files are cut for; any layout loads them",
        )
    _add_common(one)
    one.set_defaults(run=_to_megatron)

    two = commands.add_parser("to-hf", help="a checkpoint to a Hugging Face folder")
    two.add_argument("source", type=Path, metavar="CHECKPOINT")
    two.add_argument("out", type=Path, metavar="OUT")
    two.add_argument(
        "--like",
        type=Path,
        required=True,
        metavar="HF_DIR",
        help="folder of the model that it was trained from: config, tokenizer and other files",
    )
    _add_role(two)
    _add_common(two)
    two.set_defaults(run=_to_hf)

    three = commands.add_parser("verify", help="compare two models bit by bit")
    three.add_argument("first", type=Path, metavar="A")
    three.add_argument("second", type=Path, metavar="B")
    three.add_argument("--like", type=Path, metavar="HF_DIR", help="needed if neither is one")
    three.add_argument(
        "--logits", action="store_true", help="also run both, by transformers and by Megatron"
    )
    _add_trust(three)
    _add_role(three)
    three.set_defaults(run=_verify)

    four = commands.add_parser("inspect", help="what lies at a path")
    four.add_argument("path", type=Path, metavar="PATH")
    _add_role(four)
    four.set_defaults(run=_inspect)


def _add_role(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--role",
        choices=("actor", "critic"),
        default="actor",
        help="which model of a run's checkpoint",
    )


def _add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="the model's folder names code of its own, which is not run: it computes what its "
        "model_type does",
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    _add_trust(parser)
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of all tensors; each keeps its own if not given"
    )
    parser.add_argument(
        "--max-file-size",
        type=_size,
        default="5G",
        metavar="SIZE",
        help="of a weights file, as 5G or 200M (default 5G)",
    )
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes that read and write"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT when all is written")


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)B?", text.upper())
    if not match or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 5G or 200M")
    return int(float(match[1]) * _UNITS[match[2]])


def _to_megatron(args: argparse.Namespace) -> int:
    made = to_megatron.plan(
        args.source,
        layout=Layout(tp=args.tp, pp=args.pp, ep=args.ep),
        dtype=DTYPES.get(args.dtype),
        max_file_bytes=args.max_file_size,
        trust_remote_code=args.trust_remote_code,
    )
    return _run(
        args,
        made,
        lambda progress: to_megatron.convert(
            made,
            args.out,
            overwrite=args.overwrite,
            num_workers=args.workers,
            progress=progress,
        ),
    )


def _to_hf(args: argparse.Namespace) -> int:
    made = to_hf.plan(
        find_place(args.source, role=args.role),
        args.like,
        dtype=DTYPES.get(args.dtype),
        max_file_bytes=args.max_file_size,
        trust_remote_code=args.trust_remote_code,
    )
    return _run(
        args,
        made,
        lambda progress: to_hf.convert(
            made,
            args.out,
            overwrite=args.overwrite,
            num_workers=args.workers,
            progress=progress,
        ),
    )


def _run(
    args: argparse.Namespace,
    made: to_megatron.Plan | to_hf.Plan,
    convert: Callable[[Progress], None],
) -> int:
    """Prints the plan, and carries it out unless it is a dry run."""
    if args.workers < 1:
        raise CheckpointError(f"--workers must be 1 or more, not {args.workers}")
    for line in made.lines():
        _say(line)
    sources = [args.source, args.like] if "like" in args else [args.source]
    check_output(args.out, overwrite=args.overwrite, sources=sources)
    check_space(args.out, made.needed_bytes)
    _say(f"needed     {size_text(made.needed_bytes)} for {args.out}")
    if args.dry_run:
        _say("dry run    nothing was written")
        return EXIT_DONE
    progress = Progress(made.total_bytes)
    try:
        convert(progress)
    except KeyboardInterrupt:
        sys.stderr.write(f"stopped: nothing is left of {args.out}\n")
        return EXIT_FAILED
    elapsed_s = progress.close()
    speed = size_text(int(made.total_bytes / max(elapsed_s, 1e-9)))
    _say(f"done       {args.out}, {elapsed_s:.1f} s, {speed}/s")
    return EXIT_DONE


def _verify(args: argparse.Namespace) -> int:
    from megappo.checkpoint.convert.verify import verify

    first, second = (find_place(path, role=args.role) for path in (args.first, args.second))
    if args.logits and "huggingface" not in (first.format, second.format):
        raise CheckpointError("--logits needs a Hugging Face folder as A or B, for transformers")
    found = verify(
        first,
        second,
        like=args.like,
        trust_remote_code=args.trust_remote_code,
        say=_say,
        progress=Progress,
    )
    different = [one.name for one in found if not one.is_equal]
    _say(f"{len(found) - len(different)} of {len(found)} tensors are equal")
    if args.logits:
        from megappo.checkpoint.convert.logits import compare_logits

        hf, other = (first, second) if first.format == "huggingface" else (second, first)
        gap = compare_logits(hf, other, trust_remote_code=args.trust_remote_code)
        choice = "the same" if gap.same_choice else "NOT always the same"
        _say(
            f"logits     largest difference {gap.short:.2e} in a short prompt, {gap.late:.2e} at "
            f"the end of one of {gap.late_position} tokens; {choice} token is likeliest"
        )
    return EXIT_FAILED if different else EXIT_DONE


def _inspect(args: argparse.Namespace) -> int:
    from megappo.checkpoint.convert.inspect import inspect

    for line in inspect(find_place(args.path, role=args.role)):
        _say(line)
    return EXIT_DONE


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
