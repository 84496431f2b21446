"""What answers prompts, and who asks whom: this rank's engine, its settings, its neighbours."""

from __future__ import annotations

from pathlib import Path

from megappo.config import Config
from megappo.config.servers import server_owners
from megappo.distributed.parallel import ParallelContext, group_of, replicas
from megappo.roles.actor import Actor
from megappo.rollout.engine import RolloutEngine
from megappo.rollout.megatron_engine import MegatronEngine
from megappo.rollout.placement import Placement, sharing_domains
from megappo.rollout.sampling import SamplingSettings, end_token_ids
from megappo.rollout.sglang_engine import EngineSettings, SGLangEngine
from megappo.rollout.sglang_server import SGLangServer
from megappo.trainer.preflight import Preflight
from megappo.trainer.servers import context_length, server_settings


def make_placement(config: Config, context: ParallelContext) -> Placement:
    """Which ranks own engines, and which of them this rank asks. Collective over the world."""
    layout = replicas(tp=context.tp, cp=context.cp, dp=context.dp, pp=context.pp)
    if config.rollout.url:
        domains = [list(range(context.world_size))]
        owners = server_owners(len(config.rollout.url), context.world_size)
    else:
        domains = sharing_domains(layout, config.rollout.tp)
        owners = list(range(0, context.world_size, config.rollout.tp))
    return Placement(
        rank=context.rank,
        owner_ranks=frozenset(owners),
        members=tuple(next(d for d in domains if context.rank in d)),
        group=group_of(context.rank, domains, timeout_s=config.trainer.distributed_timeout_s),
    )


def make_sampling(config: Config) -> SamplingSettings:
    """How training samples are drawn."""
    rollout = config.rollout
    return SamplingSettings(
        max_new_tokens=rollout.max_response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop=tuple(rollout.stop),
        stop_token_ids=stop_token_ids(config),
    )


def stop_token_ids(config: Config) -> tuple[int, ...]:
    """The model's end tokens and the user's, ascending."""
    return tuple(sorted({*end_token_ids(config.model.path), *config.rollout.stop_token_ids}))


def make_engine(
    config: Config, found: Preflight, context: ParallelContext, actor: Actor, log_file: Path
) -> RolloutEngine:
    """What `rollout.engine` names, with the model folder's weights or the actor's own."""
    if config.rollout.url:
        owners = server_owners(len(config.rollout.url), context.world_size)
        url = config.rollout.url[owners.index(context.rank)]
        return SGLangServer(server_settings(config, found, url, device=context.device.type))
    if config.rollout.engine == "sglang":
        return SGLangEngine(_engine_settings(config, context, log_file))
    (chunk,) = actor.policy.network.chunks
    return MegatronEngine(
        chunk=chunk,
        vocab_size=found.actor_spec.vocab_size,
        memory=actor.trainable.memory,
        context=context,
        tokenizer=found.tokenizer,
        end_tokens=frozenset({*end_token_ids(config.model.path), found.tokenizer.eos_token_id})
        - {None},
        context_length=context_length(config),
        max_running_requests=config.rollout.max_running_requests,
    )


def _engine_settings(config: Config, context: ParallelContext, log_file: Path) -> EngineSettings:
    on_cuda = context.device.type == "cuda"
    return EngineSettings(
        model_path=Path(config.model.path),
        log_file=log_file,
        device=context.device.type,
        dtype=config.model.dtype,
        context_length=context_length(config),
        max_running_requests=config.rollout.max_running_requests,
        mem_fraction_static=config.rollout.gpu_memory_utilization if on_cuda else None,
        tp_size=config.rollout.tp,
        base_gpu_id=context.local_rank if on_cuda else 0,
        local_rank=context.local_rank,
        bucket_bytes=config.rollout.sync_bucket_bytes,
        verify_sync=config.rollout.verify_sync,
        timeout_s=config.rollout.timeout_s,
        memory_saver=config.rollout.sleep and on_cuda,
        trust_remote_code=config.model.trust_remote_code,
    )
