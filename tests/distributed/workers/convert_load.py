"""Fills models by Megatron's loader from converted checkpoints, and compares with the HF folder."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from megappo.distributed import parallel
from megappo.models import build, hf_export, weights
from megappo.models.hf_folder import TensorFolder
from megappo.models.spec import load_spec


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path)
    parser.add_argument("--checkpoints", type=Path)
    for name in ("tp", "pp", "vp", "ep"):
        parser.add_argument(f"--{name}", type=int, default=1)
    arguments = parser.parse_args()
    launch = parallel.LaunchEnvironment.read()
    degrees = parallel.Degrees(
        tp=arguments.tp, pp=arguments.pp, vp=arguments.vp, ep=arguments.ep, etp=arguments.tp
    )
    context = parallel.start(launch, degrees, device="cpu", seed=1, timeout_s=300)
    for folder in sorted(arguments.models.iterdir()):
        check(folder, arguments.checkpoints / folder.name / "release", arguments)
    parallel.stop(context)


def check(folder: Path, checkpoint: Path, arguments: argparse.Namespace) -> None:
    from megatron.core import parallel_state as ps

    from megappo.checkpoint.convert.load_model import load_model

    spec = load_spec(folder)
    config = build.transformer_config(
        spec,
        tp=arguments.tp,
        pp=arguments.pp,
        vp=arguments.vp,
        ep=arguments.ep,
        etp=arguments.tp,
        sequence_parallel=arguments.tp > 1,
    )
    chunks = []
    for stage in range(arguments.vp):
        vp_stage = stage if arguments.vp > 1 else None
        where = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
        chunk = build.build_chunk(
            spec,
            config,
            head="lm",
            pre_process=ps.is_pipeline_first_stage(**where),
            post_process=ps.is_pipeline_last_stage(**where),
            vp_stage=vp_stage,
        )
        with torch.no_grad():
            for parameter in chunk.parameters():
                parameter.fill_(float("nan"))
        chunks.append(chunk)
    load_model(chunks, checkpoint)
    compared = 0
    with TensorFolder(folder) as tensors:
        for name, tensor in hf_export.export_hf(chunks, spec):
            assert torch.equal(tensor, tensors.read(name)), (folder.name, name)
            compared += 1
        expected = weights.check_names(tensors, spec, "lm")
    assert compared == len(expected), (compared, len(expected))


if __name__ == "__main__":
    main()
