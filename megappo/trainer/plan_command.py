"""`megappo plan`: memory, traffic and time of a layout, or a search for the best one.

The arithmetic is in `megappo.planner`; here are the command line, the models' folders, of which
config.json is enough, and the rules that a run has beyond the layout.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping

from megappo.config import Config, ConfigError, load
from megappo.errors import EXIT_DONE, EXIT_FAILED, UserError
from megappo.models.spec import ModelSpec, load_spec
from megappo.planner.constants import FLOPS_EFFICIENCY, GPUS, GPUS_PER_NODE, Gpu
from megappo.planner.job import Job
from megappo.planner.plan import as_json, plan
from megappo.planner.report import plan_lines, search_lines
from megappo.planner.search import Found, problems_of, search, summary
from megappo.registry import did_you_mean
from megappo.trainer.model_checks import check_engine_family, check_engine_split, model_paths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--model", metavar="DIR", help="folder with config.json, for model.path")
    parser.add_argument("--gpus", type=int, help="devices in all")
    parser.add_argument("--nodes", type=int, help="nodes; with --gpus-per-node in place of --gpus")
    parser.add_argument("--gpus-per-node", type=int, default=GPUS_PER_NODE)
    parser.add_argument("--gpu", default="h100-80gb", help=f"device: {', '.join(GPUS)}")
    parser.add_argument(
        "--response-length",
        type=int,
        default=0,
        help="tokens of a usual response, for times; the longest if not given",
    )
    parser.add_argument(
        "--efficiency",
        type=float,
        default=FLOPS_EFFICIENCY,
        help="share of a device's peak that matrix products reach",
    )
    parser.add_argument("--search", action="store_true", help="propose layouts for the devices")
    parser.add_argument("--top", type=int, default=5, help="layouts that --search shows")
    parser.add_argument("--json", action="store_true", help="print JSON, bytes and seconds")
    parser.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> int:
    gpu = _gpu(args.gpu)
    overrides = [*args.overrides, *([f"model.path={args.model}"] if args.model else [])]
    config = load(args.config, overrides)
    world_size = _world_size(args)
    _check_arguments(args, config)
    _check_adapters(config)
    specs = _specs(config)
    warnings = _warnings(config, specs)
    if args.search:
        return _search(args, config, specs, gpu, world_size, warnings)
    problems = problems_of(config, specs, world_size=world_size, gpus_per_node=args.gpus_per_node)
    problems += _engine_problems(config, specs["actor"])
    if problems:
        raise ConfigError("\n".join(problems))
    job = Job.of(
        config,
        specs,
        world_size=world_size,
        gpus_per_node=args.gpus_per_node,
        mean_response=args.response_length,
    )
    found = plan(job, gpu, efficiency=args.efficiency)
    if args.json:
        _print_json(as_json(found) | {"warnings": warnings})
    else:
        _print([*plan_lines(found), *_as_lines(warnings)])
    return EXIT_FAILED if found.fit.problems else EXIT_DONE


def _search(
    args: argparse.Namespace,
    config: Config,
    specs: Mapping[str, ModelSpec],
    gpu: Gpu,
    world_size: int,
    warnings: list[str],
) -> int:
    found = search(
        config,
        specs,
        gpu,
        world_size=world_size,
        gpus_per_node=args.gpus_per_node,
        engine_rule=check_engine_split,
        mean_response=args.response_length,
        efficiency=args.efficiency,
    )
    if args.json:
        _print_json(_search_json(found, args.top) | {"warnings": warnings})
    else:
        _print([*search_lines(found, top=args.top), *_as_lines(warnings)])
    return EXIT_DONE if found.plans else EXIT_FAILED


def _search_json(found: Found, top: int) -> dict[str, object]:
    return {
        "num_tried": found.num_tried,
        "num_fitting": len(found.plans),
        "plans": [as_json(one, found.given) for one in found.plans[:top]],
        "refused": [
            {"layout": one.layout, "kind": one.kind, "reason": one.reason} for one in found.refused
        ],
        "reasons": [
            {"count": count, "example": example.layout, "reason": example.reason}
            for count, example in summary(found.refused)
        ],
    }


def _gpu(name: str) -> Gpu:
    if name not in GPUS:
        raise UserError(f"--gpu {name!r} is not known{did_you_mean(name, GPUS)}")
    return GPUS[name]


def _world_size(args: argparse.Namespace) -> int:
    """Devices, from --gpus or --nodes.

    Raises:
        UserError: neither or both were given, or a count is no count of whole nodes.
    """
    if (args.gpus is None) == (args.nodes is None):
        raise UserError("give the number of devices, either --gpus N or --nodes N")
    for name in ("gpus", "nodes", "gpus_per_node", "top"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}: it must be at least 1")
    each = int(args.gpus_per_node)
    world_size = int(args.nodes * each if args.gpus is None else args.gpus)
    if world_size > each and world_size % each:
        raise UserError(
            f"--gpus is {world_size}: it must be whole nodes of {each}, or less than one; give "
            "--gpus-per-node if nodes are other"
        )
    return world_size


def _check_arguments(args: argparse.Namespace, config: Config) -> None:
    longest = config.rollout.max_response_length
    if not 0 <= args.response_length <= longest:
        raise UserError(
            f"--response-length is {args.response_length}: it must be between 1 and "
            f"rollout.max_response_length ({longest})"
        )
    if not 0 < args.efficiency <= 1:
        raise UserError(f"--efficiency is {args.efficiency}: it must lie in (0, 1]")


def _check_adapters(config: Config) -> None:
    for role, settings in config.trained_roles.items():
        if settings.lora.rank:
            raise ConfigError(
                f"{role}.lora.rank is {settings.lora.rank}: plan knows models that are trained "
                f"whole, and adapters need far less; set {role}.lora.rank=0 to plan the whole model"
            )


def _specs(config: Config) -> dict[str, ModelSpec]:
    """Every role's architecture; weights and tokenizers need not be there."""
    trust = config.model.trust_remote_code
    by_path = {
        path: load_spec(path, trust_remote_code=trust, files=False)
        for path in set(model_paths(config).values())
    }
    return {role: by_path[path] for role, path in model_paths(config).items()}


def _engine_problems(config: Config, spec: ModelSpec) -> list[str]:
    if config.rollout.url or config.rollout.engine != "sglang":
        return []
    try:
        check_engine_split(spec, config.rollout.tp)
    except UserError as error:
        return [str(error)]
    return []


def _warnings(config: Config, specs: Mapping[str, ModelSpec]) -> list[str]:
    """What `megappo check` would refuse though memory and layout are right."""
    try:
        check_engine_family(specs["actor"], config.rollout.engine)
    except UserError as error:
        return [f"megappo check refuses such a run for another reason: {error}"]
    return []


def _as_lines(warnings: list[str]) -> list[str]:
    return ["", *(f"warning    {warning}" for warning in warnings)] if warnings else []


def _print(lines: list[str]) -> None:
    sys.stdout.write("\n".join(line.rstrip() for line in lines) + "\n")


def _print_json(content: object) -> None:
    json.dump(content, sys.stdout, indent=1)
    sys.stdout.write("\n")
