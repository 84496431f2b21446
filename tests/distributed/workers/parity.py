"""Loads tiny models in one parallel layout; writes logits, gradients and the exported folder.

The loss is a weighted sum of the log-probs of next tokens, or of values for a critic, so its
gradients are the same in every layout. Gradients are exported under Hugging Face names by putting
them in place of the weights.
"""

# ruff: noqa: E402 - Megatron may be imported only after cpu_backend.install.
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megappo.distributed.cpu_backend import install

install("cpu")

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core import tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import param_is_not_shared

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_models import sequences

from megappo.distributed.vocab_parallel import log_probs_and_entropy
from megappo.models import build, hf_export, packing, weights
from megappo.models.spec import load_spec


def main() -> None:
    arguments = _arguments()
    dist.init_process_group("gloo")
    ps.initialize_model_parallel(
        tensor_model_parallel_size=arguments.tp,
        pipeline_model_parallel_size=arguments.pp,
        virtual_pipeline_model_parallel_size=arguments.vp if arguments.vp > 1 else None,
        context_parallel_size=arguments.cp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    for folder in sorted(arguments.models.iterdir()):
        run_model(folder, arguments.out / folder.name, arguments)
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--vp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--layers", type=int, nargs="*", default=[])
    parser.add_argument("--sp", action="store_true")
    parser.add_argument("--padded", action="store_true")
    parser.add_argument("--head", default="lm")
    parser.add_argument("--recompute", default="none")
    return parser.parse_args()


def run_model(folder: Path, out: Path, arguments: argparse.Namespace) -> None:
    spec = load_spec(folder)
    config = build.transformer_config(
        spec,
        tp=arguments.tp,
        pp=arguments.pp,
        vp=arguments.vp,
        cp=arguments.cp,
        pipeline_layers=arguments.layers,
        sequence_parallel=arguments.sp,
        recompute=arguments.recompute,
    )
    chunks = [
        build_stage(spec, config, arguments, stage if arguments.vp > 1 else None)
        for stage in range(arguments.vp)
    ]
    weights.load_hf_weights(chunks, folder, spec, head=arguments.head)
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = [DistributedDataParallel(config, settings, chunk) for chunk in chunks]
    outputs = forward_backward(wrapped, config, spec, arguments)
    finalize_model_grads(wrapped)
    norm = gradient_norm(chunks)
    if dist.get_rank() == 0:
        out.mkdir(parents=True)
    dist.barrier()
    hf_export.save_hf(
        wrapped, spec, folder, out / "saved", head=arguments.head, max_shard_bytes=2**16
    )
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad)
    gradients = {n: t.clone() for n, t in hf_export.export_hf(chunks, spec, head=arguments.head)}
    if dist.get_rank() == dist.get_world_size() - 1:
        torch.save({"outputs": outputs, "gradients": gradients, "norm": norm}, out / "result.pt")
    dist.barrier()


def build_stage(spec, config, arguments, vp_stage):
    where = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    return build.build_chunk(
        spec,
        config,
        head=arguments.head,
        pre_process=ps.is_pipeline_first_stage(**where),
        post_process=ps.is_pipeline_last_stage(**where),
        vp_stage=vp_stage,
        value_head_std=0.3,
        value_head_seed=5,
    )


def forward_backward(chunks, config, spec, arguments) -> list[torch.Tensor]:
    """Two micro-batches through Megatron's schedule; all outputs, on the last stage only."""
    ids = sequences()
    pieces = [ids[:3], ids[3:]]
    align = packing.Alignment(
        multiple_of=arguments.tp if arguments.sp else 1,
        cp=arguments.cp,
        cp_rank=ps.get_context_parallel_rank(),
        packed=not arguments.padded,
    )
    packed = [packing.pack(piece, align) for piece in pieces]
    outputs: list[torch.Tensor] = []

    def step(iterator, model):
        batch = next(iterator)
        result = model(
            batch.tokens,
            batch.position_ids,
            None,
            packed_seq_params=packing.packed_seq_params(batch),
        )
        return result, lambda output: loss(output, batch)

    def loss(output, batch):
        scale = loss_weights(batch)
        if arguments.head == "value":
            outputs.append(in_order(output.flatten()[:, None], batch))
            per_token = output
        else:
            full = gather_vocabulary(output)[..., : spec.vocab_size]
            outputs.append(in_order(full.flatten(0, 1), batch))
            per_token, entropy = log_probs_and_entropy(
                output,
                batch.labels,
                tp_group=ps.get_tensor_model_parallel_group(),
                vocab_size=spec.vocab_size,
                chunk_tokens=8,
                with_entropy=True,
            )
            per_token = per_token + 0.3 * entropy
        total = (per_token * scale).sum()
        count = int((batch.segments > 0).sum())
        return total, torch.tensor(count, dtype=torch.int), {"loss": total.detach().clone()}

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(packed) for _ in chunks],
        model=chunks,
        num_microbatches=len(packed),
        seq_length=max(p.total_tokens for p in packed),
        micro_batch_size=1,
        forward_only=False,
    )
    return outputs


def loss_weights(batch) -> torch.Tensor:
    """One weight a token by its sequence and position alone, 0 on padding."""
    real = batch.segments > 0
    numbers = (batch.segments - 1).clamp(min=0)
    lengths = torch.tensor([*batch.real_lengths])[numbers]
    return torch.where(real, 1.0 + numbers - 2.0 * batch.position_ids / lengths, 0.0)


def in_order(rows: torch.Tensor, batch) -> torch.Tensor:
    """Outputs of all real tokens, sequence by sequence, put together over CP ranks."""
    whole = torch.zeros(sum(batch.lengths), rows.shape[-1])
    whole[batch.local] = rows.detach()
    dist.all_reduce(whole, group=ps.get_context_parallel_group())
    starts = batch.starts[: batch.num_sequences]
    ranges = zip(starts, batch.real_lengths, strict=True)
    return torch.cat([whole[start : start + n] for start, n in ranges])


def gradient_norm(chunks) -> float:
    """Over all ranks, each parameter once, by the marks that Megatron's clipping reads."""
    total = torch.zeros(1)
    for chunk in chunks:
        for parameter in chunk.parameters():
            once = tensor_parallel.param_is_not_tensor_parallel_duplicate(parameter)
            if once and param_is_not_shared(parameter):
                total += parameter.main_grad.square().sum()
    dist.all_reduce(total)
    # Context-parallel ranks hold the same weights, with the same summed gradients.
    return (total / ps.get_context_parallel_world_size()).sqrt().item()


def gather_vocabulary(logits: torch.Tensor) -> torch.Tensor:
    group = ps.get_tensor_model_parallel_group()
    shards = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(shards, logits.detach().contiguous(), group=group)
    return torch.cat(shards, dim=-1)


if __name__ == "__main__":
    main()
