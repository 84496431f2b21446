"""Builds Megatron-Core models from a `ModelSpec`.

Megatron is imported inside the functions: `cpu_backend.install` must come first, and
`check_layout` and `padded_vocab_size` serve `megappo check` and the planner, which do without it.
Experts are described in `moe`. Left out: layers that predict several tokens, weights kept in fp8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F

from megappo.errors import ModelError
from megappo.models.latent_attention import name_norms_in_checkpoints, use_whole_projections
from megappo.models.moe import check_experts, keep_router_bias_exact, moe_settings
from megappo.models.name_map import Head
from megappo.models.rope import inverse_frequencies
from megappo.models.spec import ModelSpec

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

Recompute = Literal["none", "selective", "full"]
Fp8Format = Literal["none", "e4m3", "hybrid"]


def check_layout(
    spec: ModelSpec,
    *,
    tp: int,
    pp: int,
    vp: int = 1,
    pipeline_layers: Sequence[int] = (),
    ep: int = 1,
    etp: int | None = None,
    sequence_parallel: bool = False,
) -> None:
    """Checks that the model can be split over tensor, pipeline and expert ranks.

    Args:
        spec: The model.
        tp: Tensor-parallel ranks.
        pp: Pipeline-parallel ranks.
        vp: Model chunks on each pipeline rank.
        pipeline_layers: As in `chunk_layers`.
        ep: Expert-parallel ranks.
        etp: Tensor-parallel ranks of one expert; None for `tp`.
        sequence_parallel: Whether tokens are split over the TP ranks.

    Raises:
        ModelError: with the numbers of the first split that is impossible.
    """
    check_experts(spec, tp=tp, ep=ep, etp=etp, sequence_parallel=sequence_parallel)
    splits = [("query heads", spec.num_heads), ("key-value heads", spec.num_kv_heads)]
    if not all(spec.has_experts(layer) for layer in range(spec.num_layers)):
        splits.append(("MLP columns (intermediate_size)", spec.ffn_hidden_size))
    for what, count in splits:
        if count % tp:
            raise ModelError(
                f"{what} must divide over the tensor-parallel ranks: {count} over {tp}; "
                f"choose a parallel.tp that divides {count}"
            )
    chunk_layers(spec.num_layers, pp=pp, vp=vp, wanted=pipeline_layers)


def chunk_layers(
    num_layers: int, *, pp: int, vp: int = 1, wanted: Sequence[int] = ()
) -> tuple[int, ...]:
    """Layers of each pipeline chunk, in the order of the model.

    Chunk i stands on pipeline rank i % `pp`. Without `wanted` the counts are as even as can be;
    what is left over goes to the middle first, to the last chunk, which has the head's work, last.

    Args:
        num_layers: of the model.
        pp: Pipeline-parallel ranks.
        vp: Chunks on each of them.
        wanted: Counts that were asked for; empty for even ones.

    Raises:
        ModelError: `wanted` has another length or sum, or a chunk would be empty.
    """
    num_chunks = pp * vp
    if wanted:
        if len(wanted) != num_chunks or sum(wanted) != num_layers or min(wanted) < 1:
            raise ModelError(
                f"parallel.pipeline_layers {list(wanted)} must be {num_chunks} counts over 0 "
                f"({pp} stages x {vp} chunks) that add up to the model's {num_layers} layers"
            )
        return tuple(wanted)
    if num_layers < num_chunks:
        raise ModelError(
            f"{num_layers} layers do not fill {num_chunks} pipeline chunks (parallel.pp {pp} x "
            f"parallel.vpp {vp}): choose sizes whose product is at most {num_layers}"
        )
    counts = [num_layers // num_chunks] * num_chunks
    takers = [*range(1, num_chunks - 1), 0, num_chunks - 1]
    for chunk in takers[: num_layers % num_chunks]:
        counts[chunk] += 1
    return tuple(counts)


def _pipeline_layout(num_layers: int, pp: int, vp: int, wanted: Sequence[int]) -> Any:
    """Megatron's form of an uneven split, None for an even one."""
    counts = chunk_layers(num_layers, pp=pp, vp=vp, wanted=wanted)
    if len(set(counts)) == 1:
        return None
    layout = [["decoder"] * count for count in counts]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return layout


def padded_vocab_size(vocab_size: int, *, tp: int) -> int:
    """Rows of the embedding over all TP ranks: the next multiple of `tp`."""
    return -(-vocab_size // tp) * tp


def transformer_config(
    spec: ModelSpec,
    *,
    tp: int,
    pp: int,
    cp: int = 1,
    vp: int = 1,
    pipeline_layers: Sequence[int] = (),
    ep: int = 1,
    etp: int | None = None,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    recompute: Recompute = "none",
    fp8: Fp8Format = "none",
    fp8_recipe: str = "delayed",
    gradient_accumulation_fusion: bool = False,
) -> TransformerConfig:
    """Megatron's description of the model and its layout.

    Args:
        spec: The model.
        tp: Tensor-parallel ranks.
        pp: Pipeline-parallel ranks.
        cp: Context-parallel ranks.
        vp: Model chunks on each pipeline rank.
        pipeline_layers: Layers of each chunk; empty for even ones (`chunk_layers`).
        ep: Expert-parallel ranks.
        etp: Tensor-parallel ranks of one expert; None for `tp`.
        sequence_parallel: Split norms and dropout over the TP ranks; without effect at `tp` 1.
        dtype: Of the parameters and activations.
        device: `cpu` takes Megatron's local layers, `cuda` those of Transformer Engine.
        recompute: Activations computed again in the backward pass: none, those of the core
            attention, or all within a layer.
        fp8: Format of Transformer Engine's fp8 products; CUDA only.
        fp8_recipe: How they are scaled.
        gradient_accumulation_fusion: Add weight gradients within the matrix product; needs
            Apex's kernel.

    Raises:
        ModelError: the model does not divide over the layout.
    """
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    check_layout(
        spec,
        tp=tp,
        pp=pp,
        vp=vp,
        pipeline_layers=pipeline_layers,
        ep=ep,
        etp=etp,
        sequence_parallel=sequence_parallel,
    )
    on_cuda = device == "cuda"
    full = {"recompute_method": "uniform", "recompute_num_layers": 1} if recompute == "full" else {}
    scaled = spec.rope.embedding_scale != 1.0
    config = (TransformerConfig if spec.latent is None else MLATransformerConfig)(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_hidden_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm or spec.latent is not None,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp if vp > 1 else None,
        pipeline_model_parallel_layout=_pipeline_layout(spec.num_layers, pp, vp, pipeline_layers),
        context_parallel_size=cp,
        sequence_parallel=sequence_parallel and tp > 1,
        # Packed rows differ in length, so stages announce shapes; Megatron then insists on the
        # all-to-all dispatcher even for dense models (transformer_config.py:1828).
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # Interleaved stages give wrong results with batched sends in megatron-core 0.16.1.
        overlap_p2p_comm=vp > 1,
        batch_p2p_comm=vp == 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp8=None if fp8 == "none" else fp8,
        fp8_recipe=fp8_recipe,
        calculate_per_token_loss=True,
        # Every parameter is filled from the folder, so none is drawn first.
        perform_initialization=False,
        use_cpu_initialization=not on_cuda,
        transformer_impl="transformer_engine" if on_cuda else "local",
        bias_activation_fusion=on_cuda,
        bias_dropout_fusion=on_cuda,
        # The fused kernels know neither a factor on sines and cosines nor latent plain RoPE.
        apply_rope_fusion=on_cuda and not scaled and spec.latent is None,
        masked_softmax_fusion=on_cuda,
        gradient_accumulation_fusion=gradient_accumulation_fusion,
        persist_layer_norm=on_cuda,
        cuda_graph_scope=[],
        recompute_granularity=None if recompute == "none" else recompute,
        **full,
        **moe_settings(spec, tp=tp, ep=ep, etp=etp, on_cuda=on_cuda),
        **_latent_settings(spec),
    )
    if scaled:
        # Where attention.py:1102 looks for the factor on sines and cosines.
        config.yarn_rotary_scaling_factor = spec.rope.parameters["factor"]
    return config


def _latent_settings(spec: ModelSpec) -> dict[str, Any]:
    """Arguments of MLATransformerConfig that describe latent attention; none without it."""
    if spec.latent is None:
        return {}
    parameters = spec.rope.parameters
    return {
        "q_lora_rank": spec.latent.query_rank,
        "kv_lora_rank": spec.latent.key_value_rank,
        "qk_head_dim": spec.latent.plain_dim,
        "qk_pos_emb_head_dim": spec.latent.rotary_dim,
        "v_head_dim": spec.latent.value_dim,
        # Frequencies are ours; of these numbers Megatron takes the factor on query-key products.
        "rope_type": "rope",
        "rotary_scaling_factor": parameters.get("factor", 1.0),
        "mscale_all_dim": parameters.get("mscale_all_dim", 0.0),
    }


def build_chunk(
    spec: ModelSpec,
    config: TransformerConfig,
    *,
    head: Head,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    value_head_std: float = 0.0,
    value_head_seed: int = 0,
) -> GPTModel:
    """One pipeline stage, or one of its chunks, with parameters that are not yet filled.

    Collective over the embedding group (first and last stage) when the model is tied and `pp` > 1.

    Args:
        spec: The model.
        config: From `transformer_config`.
        head: `lm` gives logits [B, S, V / TP], `value` gives values [B, S] float32.
        pre_process: The chunk holds the embedding.
        post_process: The chunk holds the last norm and the head.
        vp_stage: Number of the chunk on this rank, None without interleaving.
        value_head_std: Spread of a new value head; see `ValueHead`.
        value_head_seed: Of a new value head.
    """
    from megatron.core.models.gpt import GPTModel

    chunk = GPTModel(
        config=config,
        transformer_layer_spec=_block_spec(spec, config, vp_stage),
        vocab_size=padded_vocab_size(spec.vocab_size, tp=config.tensor_model_parallel_size),
        max_sequence_length=spec.max_positions,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=spec.tied and head == "lm",
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )
    if spec.latent is not None and config.use_cpu_initialization:
        use_whole_projections(chunk)
    _mark_sharded_parameters(chunk)
    # Megatron's own formulas know one set of llama3 numbers only.
    for rotary in rotary_embeddings(chunk):
        frequencies = inverse_frequencies(spec.rope, spec.rotary_dim)
        rotary.inv_freq = frequencies.to(rotary.inv_freq.device)
    if head == "value" and post_process:
        from megappo.models.value_head import ValueHead

        chunk.output_layer = ValueHead(config, std=value_head_std, seed=value_head_seed)
    if not config.use_cpu_initialization:
        chunk.cuda()
    chunk.to(config.params_dtype)
    keep_router_bias_exact(chunk)
    return chunk


def rotary_embeddings(chunk: GPTModel) -> list[Any]:
    """The modules that turn positions into angles: the chunk's, or each layer's if latent."""
    if chunk.config.multi_latent_attention:
        return [layer.self_attention.rotary_pos_emb for layer in chunk.decoder.layers]
    return [chunk.rotary_pos_emb]


def _mark_sharded_parameters(chunk: torch.nn.Module) -> None:
    """Says which parameters are shards over TP.

    Megatron's layers do so while they draw weights (layers.py:101), which is left out here. Without
    the mark a shard counts as a copy, and the gradient norm is that of TP rank 0's shards alone.
    """
    from megatron.core.tensor_parallel import layers

    sharded_dim = {
        layers.ColumnParallelLinear: 0,
        layers.RowParallelLinear: 1,
        layers.VocabParallelEmbedding: 0,
    }
    for module in chunk.modules():
        dim = sharded_dim.get(type(module))
        weight = getattr(module, "weight", None)
        if dim is not None and weight is not None and not hasattr(weight, "partition_dim"):
            layers.set_tensor_model_parallel_attributes(weight, True, dim, 1)


def _block_spec(
    spec: ModelSpec, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of this chunk: Transformer Engine's, or local ones with our attention."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from megappo.models.attention import PackedCausalAttention
    from megappo.models.moe_layer import use_packed_moe

    on_cuda = config.transformer_impl == "transformer_engine"
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=on_cuda, normalization="RMSNorm", vp_stage=vp_stage
    )
    first = get_transformer_layer_offset(config, vp_stage)
    for number, layer in enumerate(block.layer_specs, first):
        if spec.latent is not None and not on_cuda:
            name_norms_in_checkpoints(layer, dense=not spec.has_experts(number))
        use_packed_moe(layer, spec)
        if not on_cuda:
            layer.submodules.self_attention.submodules.core_attention = PackedCausalAttention
    if on_cuda:
        return block
    return TransformerBlockSubmodules(layer_specs=block.layer_specs, layer_norm=WrappedTorchNorm)
