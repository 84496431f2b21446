"""Runs tiny models with experts in one parallel layout; writes outputs, gradients and norms.

Each model goes through several passes that differ in the main loss, in the balance loss and in how
the mini-batch is cut. Sequences are dealt to the DP ranks in turn, and the loss weighs every token
by its number in the whole batch, so all layouts compute the same sum.
"""

# ruff: noqa: E402 - Megatron may be imported only after cpu_backend.install.
from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from itertools import accumulate
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
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_models import sequences

from megappo.distributed.vocab_parallel import log_probs_and_entropy
from megappo.models import build, hf_export, moe, packing, weights
from megappo.models.spec import load_spec

LENGTHS = [len(ids) for ids in sequences()]
OFFSETS = [0, *accumulate(LENGTHS)]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One mini-batch."""

    main: float = 0.0
    """Factor on the main loss."""
    coefficient: float = 0.0
    """Of the balance loss."""
    num_micro_batches: int = 2


PASSES = {
    "main": Pass(main=1.0),
    "balance_in_one": Pass(coefficient=0.1, num_micro_batches=1),
    "balance_in_two": Pass(coefficient=0.1),
    "balance_in_three": Pass(coefficient=0.1, num_micro_batches=3),
    "both": Pass(main=1.0, coefficient=0.1),
    "neither": Pass(),
}


def main() -> None:
    arguments = _arguments()
    dist.init_process_group("gloo")
    ps.initialize_model_parallel(
        tensor_model_parallel_size=arguments.tp,
        pipeline_model_parallel_size=arguments.pp,
        context_parallel_size=arguments.cp,
        expert_model_parallel_size=arguments.ep,
        expert_tensor_parallel_size=arguments.etp or arguments.tp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    for folder in sorted(arguments.models.iterdir()):
        run_model(folder, arguments.out / folder.name, arguments)
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path)
    parser.add_argument("--out", type=Path)
    for name in ("tp", "pp", "cp", "ep"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--etp", type=int)
    parser.add_argument("--recompute", default="none")
    return parser.parse_args()


def run_model(folder: Path, out: Path, arguments: argparse.Namespace) -> None:
    spec = load_spec(folder)
    config = build.transformer_config(
        spec,
        tp=arguments.tp,
        pp=arguments.pp,
        cp=arguments.cp,
        ep=arguments.ep,
        etp=arguments.etp,
        sequence_parallel=True,
        recompute=arguments.recompute,
    )
    config.finalize_model_grads_func = finalize_model_grads
    chunk = build.build_chunk(
        spec,
        config,
        head="lm",
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
    )
    weights.load_hf_weights([chunk], folder, spec)
    if dist.get_rank() == 0:
        out.mkdir(parents=True)
    dist.barrier()
    hf_export.save_hf([chunk], spec, folder, out / "saved", max_shard_bytes=2**16)
    before = {name: p.detach().clone() for name, p in chunk.named_parameters()}
    results = {
        name: run_pass(chunk, config, spec, it, arguments)
        | norm(chunk, config, spec, it, arguments)
        for name, it in PASSES.items()
    }
    assert all(torch.equal(before[name], p) for name, p in chunk.named_parameters())
    results["without_gradients"] = forward_only(chunk, arguments)
    torch.save(results, out / f"rank{dist.get_rank()}.pt")
    dist.barrier()


def wrap(chunk, config, **settings) -> DistributedDataParallel:
    return DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, **settings), chunk
    )


def run_pass(chunk, config, spec, it: Pass, arguments) -> dict:
    """Outputs, gradients under Hugging Face names, and this rank's part of the balance loss."""
    wrapped = wrap(chunk, config)
    wrapped.zero_grad_buffer()
    outputs, taken = forward_backward(wrapped, spec, it, arguments)
    same = equal_over_tensor_ranks(chunk)
    weights_before = [p.detach().clone() for p in chunk.parameters()]
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.copy_(parameter.main_grad)
        gradients = {
            name: t.clone()
            for name, t in hf_export.export_hf([chunk], spec)
            if not name.endswith("e_score_correction_bias")
        }
        for parameter, value in zip(chunk.parameters(), weights_before, strict=True):
            parameter.copy_(value)
    return {"outputs": outputs, "balance": taken, "gradients": gradients, "copies_equal": same}


def norm(chunk, config, spec, it: Pass, arguments) -> dict:
    """Gradient norm as Megatron's distributed optimizer takes it."""
    wrapped = wrap(chunk, config, use_distributed_optimizer=True)
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-3, use_distributed_optimizer=True, params_dtype=torch.float32
    )
    optimizer = get_megatron_optimizer(settings, [wrapped])
    wrapped.zero_grad_buffer()
    optimizer.zero_grad()
    forward_backward(wrapped, spec, it, arguments)
    optimizer.prepare_grads()
    return {"norm": float(optimizer.get_grad_norm())}


def deal(arguments, num_micro_batches: int) -> list[tuple[list[int], packing.PackedInput]]:
    """This DP rank's micro-batches: numbers of the sequences, and their layout."""
    rank, size = ps.get_data_parallel_rank(), ps.get_data_parallel_world_size()
    mine = list(range(len(LENGTHS)))[rank::size]
    share = -(-len(mine) // num_micro_batches)
    pieces = [mine[i * share : (i + 1) * share] for i in range(num_micro_batches)]
    alignment = packing.Alignment(
        multiple_of=arguments.tp,
        cp=arguments.cp,
        cp_rank=ps.get_context_parallel_rank(),
    )
    ids = sequences()
    return [(piece, packing.pack([ids[i] for i in piece], alignment)) for piece in pieces]


def origins(numbers: list[int], packed: packing.PackedInput) -> torch.Tensor:
    """[S / CP] number of each local token in the whole batch, -1 for padding."""
    whole = torch.full((sum(packed.lengths),), -1)
    for number, start in zip(numbers, packed.starts, strict=False):
        length = LENGTHS[number]
        whole[start : start + length] = torch.arange(length) + OFFSETS[number]
    return whole[packed.local]


def call(model, packed: packing.PackedInput):
    return model(
        packed.tokens,
        packed.position_ids,
        None,
        packed_seq_params=packing.packed_seq_params(packed),
        padding_mask=moe.router_segments(
            packed.segments, model.config, ps.is_pipeline_first_stage()
        ),
    )


def forward_backward(model, spec, it: Pass, arguments) -> tuple[list, float]:
    micro_batches = deal(arguments, it.num_micro_batches)
    outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
    moe.set_aux_loss([model], it.coefficient * OFFSETS[-1] / len(LENGTHS))

    def step(iterator, module):
        numbers, packed = next(iterator)
        return call(module, packed), lambda output: loss(output, numbers, packed)

    def loss(output, numbers, packed):
        origin = origins(numbers, packed)
        real = origin >= 0
        per_token, entropy = log_probs_and_entropy(
            output[0],
            packed.labels[0],
            tp_group=ps.get_tensor_model_parallel_group(),
            vocab_size=spec.vocab_size,
            chunk_tokens=8,
            with_entropy=True,
        )
        outputs.append((origin[real], gather_vocabulary(output)[0, real, : spec.vocab_size]))
        scale = it.main * token_weights()[origin.clamp(min=0)] * real
        total = ((per_token + 0.3 * entropy) * scale).sum()
        return total, real.sum().to(torch.int), {"loss": total.detach().clone()}

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(micro_batches),
        model=model,
        num_microbatches=len(micro_batches),
        seq_length=max(packed.total_tokens for _, packed in micro_batches),
        micro_batch_size=1,
        forward_only=False,
    )
    taken = moe.take_aux_loss([model])
    assert moe.take_aux_loss([model]) == 0.0
    return outputs, taken


def token_weights() -> torch.Tensor:
    """Of the loss, one for each token of the batch."""
    return torch.linspace(-1, 1, OFFSETS[-1])


def forward_only(chunk, arguments) -> float:
    """Balance loss after a pass without gradients in which it is turned on."""
    moe.set_aux_loss([chunk], 1.0)
    micro_batches = deal(arguments, 2)

    def step(iterator, module):
        output = call(module, next(iterator)[1])
        return output, lambda result, non_loss_data: result.sum()

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(micro_batches),
            model=chunk,
            num_microbatches=len(micro_batches),
            seq_length=max(packed.total_tokens for _, packed in micro_batches),
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    return moe.take_aux_loss([chunk])


def equal_over_tensor_ranks(chunk) -> bool:
    """Whether the gradients of norms and routers are equal bit for bit on all TP ranks."""
    group = ps.get_tensor_model_parallel_group()
    same, compared = True, 0
    for name, parameter in chunk.named_parameters():
        if "norm" in name or "router" in name:
            compared += 1
            first = parameter.main_grad.clone()
            dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
            same = same and torch.equal(first, parameter.main_grad)
    assert compared > 4
    return same


def gather_vocabulary(logits: torch.Tensor) -> torch.Tensor:
    group = ps.get_tensor_model_parallel_group()
    shards = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(shards, logits.detach().contiguous(), group=group)
    return torch.cat(shards, dim=-1)


if __name__ == "__main__":
    main()
