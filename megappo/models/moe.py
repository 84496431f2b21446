"""Mixture of experts: rules of the layout, Megatron's settings, and the handle on the balance loss.

Legend: E experts of a layer, of which each token takes k; TP tensor, EP expert, ETP expert-tensor
and CP context-parallel ranks; B rows, S positions of a row on this rank.

Under EP each rank holds E / EP experts, and tokens travel to them by all-to-all; EP divides the
TP x CP x DP ranks of a pipeline stage. ETP splits the matrices of an expert, as TP does those of
attention. Shared experts, which all tokens pass, are a dense MLP and are split as one. Left out:
dropping tokens over a capacity, the router's z-loss, and moving a router's bias to balance it.

Megatron is imported inside the functions, as in `build`; the layers themselves are in `moe_layer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from megappo.errors import ModelError
from megappo.models.spec import ModelSpec

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megappo.models.moe_layer import BalancedRouter


def check_experts(
    spec: ModelSpec, *, tp: int, ep: int, etp: int | None, sequence_parallel: bool
) -> None:
    """Checks that a layout divides the experts, and that Megatron computes it rightly.

    Args:
        spec: The model.
        tp: Tensor-parallel ranks.
        ep: Expert-parallel ranks.
        etp: Tensor-parallel ranks of one expert; None for as many as `tp`.
        sequence_parallel: Whether tokens are split over the TP ranks.

    Raises:
        ModelError: with the numbers, the reason and what to choose.
    """
    split = tp if etp is None else etp
    if not spec.num_experts:
        if ep != 1 or split != tp:
            raise ModelError(
                f"a {spec.model_type} model has no experts to spread: parallel.ep is {ep} and "
                f"parallel.etp {etp}; set them to 1 and 0"
            )
        return
    if spec.num_experts % ep:
        raise ModelError(
            f"experts must divide over the expert-parallel ranks: {spec.num_experts} over {ep}; "
            f"choose a parallel.ep that divides {spec.num_experts}"
        )
    if spec.shared_ffn_hidden_size % tp:
        raise ModelError(
            "the columns of the shared experts (moe_intermediate_size x n_shared_experts) must "
            f"divide over the tensor-parallel ranks: {spec.shared_ffn_hidden_size} over {tp}; "
            f"choose a parallel.tp that divides {spec.shared_ffn_hidden_size}"
        )
    if tp % split:
        raise ModelError(
            f"parallel.etp must divide parallel.tp: {split} and {tp}; "
            "choose a divisor, or 0 for the same"
        )
    if spec.moe_ffn_hidden_size % split:
        raise ModelError(
            "an expert's columns (moe_intermediate_size) must divide over the expert-tensor-"
            f"parallel ranks: {spec.moe_ffn_hidden_size} over {split}; choose a "
            f"parallel.etp that divides {spec.moe_ffn_hidden_size}"
        )
    if tp > 1 and not sequence_parallel:
        raise ModelError(
            f"experts under parallel.tp={tp} need sequence parallelism: without it each "
            "tensor-parallel rank would send the same tokens to the experts; set "
            "parallel.sequence_parallel=true"
        )
    if ep == 1 and split < tp:
        # Megatron reduces such experts over DP alone (layers.py:886 marks them as dense).
        raise ModelError(
            f"parallel.etp={split} below parallel.tp={tp} needs parallel.ep above 1: with 1, "
            "Megatron leaves each tensor-parallel rank with the expert gradients of its own tokens "
            f"only; set parallel.etp={tp} or 0, or parallel.ep={tp // split}"
        )


def moe_settings(
    spec: ModelSpec, *, tp: int, ep: int, etp: int | None, on_cuda: bool
) -> dict[str, Any]:
    """Arguments of Megatron's TransformerConfig that describe the experts; none for a dense model.

    Megatron's own balance loss is off: it averages over micro-batches, so it depends on how a
    mini-batch is cut. `moe_layer` has one that does not.
    """
    if not spec.num_experts:
        return {}
    return {
        "num_moe_experts": spec.num_experts,
        "moe_ffn_hidden_size": spec.moe_ffn_hidden_size,
        "moe_router_topk": spec.experts_per_token,
        "moe_shared_expert_intermediate_size": spec.shared_ffn_hidden_size or None,
        "moe_layer_freq": [int(has_experts) for has_experts in spec.moe_layers],
        # The softmax over the chosen logits alone is the renormalised softmax over all of them.
        "moe_router_pre_softmax": not spec.norm_topk_prob,
        "moe_router_topk_scaling_factor": spec.router.scale,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # Several experts in one kernel; it exists for CUDA only.
        "moe_grouped_gemm": on_cuda,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": tp if etp is None else etp,
    }


def router_segments(
    segments: Tensor, config: TransformerConfig, pre_process: bool
) -> Tensor | None:
    """What a chunk's forward takes as `padding_mask`, by which routers tell sequences apart.

    As an argument it is the right one in every recomputation, which an attribute would not be.
    GPTModel splits it over the TP ranks in the first stage only (gpt_model.py:314), so that is done
    here for the others.

    Args:
        segments: [B, S] int, number of each token's sequence from 1, 0 for padding.
        config: Of the chunk.
        pre_process: Whether the chunk holds the embedding.

    Returns:
        [B, S], or [B, S / TP] after the first stage under sequence parallelism; None for a dense
        model.
    """
    if config.num_moe_experts is None:
        return None
    if pre_process or not config.sequence_parallel:
        return segments
    from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

    mine = scatter_to_sequence_parallel_region(segments.transpose(0, 1).contiguous())
    return mine.transpose(0, 1).contiguous()


def set_aux_loss(chunks: Sequence[nn.Module], scale: float) -> None:
    """Turns the balance loss of all routers on or off; before a mini-batch.

    Args:
        chunks: This rank's chunks, bare or wrapped.
        scale: Factor on each sequence's loss. The gradients are later divided by the main loss's
            denominator D, so `coefficient * D / N` makes it the mean over the mini-batch's N
            sequences, D and N counted over all ranks. 0 turns it off.
    """
    for router in _routers(chunks):
        router.aux_scale = scale


def take_aux_loss(chunks: Sequence[nn.Module]) -> float:
    """This rank's part of the balance loss since the last call, which it resets.

    The sum over all ranks, divided by the mini-batch's sequences, is the mean over sequences of the
    loss summed over layers, without coefficient; an even load gives 1 a layer. 0 where no pass had
    gradients.
    """
    total = 0.0
    for router in _routers(chunks):
        total += float(router.aux_loss)
        router.aux_loss.zero_()
    return total


def keep_router_bias_exact(chunk: nn.Module) -> None:
    """Brings biases of routers back to float32 after the chunk took another dtype.

    In bfloat16 a bias would change which experts are chosen. Before weights are loaded.
    """
    for router in _routers([chunk]):
        if router.rule.has_bias:
            router.expert_bias = router.expert_bias.float()


def _routers(chunks: Sequence[nn.Module]) -> Iterator[BalancedRouter]:
    from megappo.models.moe_layer import BalancedRouter

    return (m for chunk in chunks for m in chunk.modules() if isinstance(m, BalancedRouter))
