"""Rules between sections. No device, no model, no file is touched."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from megappo.config.algorithm_checks import check_algorithm, check_kl_rules
from megappo.config.layout import MemorySection, ParallelSection
from megappo.config.learning import ActorSection, CriticSection
from megappo.config.reward_model import RewardModelSection
from megappo.config.sections import Config, ModelSection
from megappo.config.servers import check_servers
from megappo.config.tracking import check_loggers


def check_sections(config: Config) -> list[str]:
    """Broken rules that need no world size."""
    problems: list[str] = []
    actor, data, rollout = config.actor, config.data, config.rollout
    if not config.model.path:
        problems.append("model.path is '': name the actor's Hugging Face folder")
    if not data.train_files:
        problems.append("data.train_files is []: name at least one Parquet file")
    if data.train_batch_size % actor.mini_batch_size:
        problems.append(
            f"actor.mini_batch_size is {actor.mini_batch_size}: it must divide "
            f"data.train_batch_size ({data.train_batch_size})"
        )
    problems += check_loggers(config.loggers)
    if (config.trainer.test_freq or config.trainer.val_before_train) and not data.val_files:
        problems.append(
            "data.val_files is []: name a file, or set trainer.test_freq=0 and "
            "trainer.val_before_train=false"
        )
    for name, role in config.trained_roles.items():
        problems += _check_budget(config, name, role)
    memories = {name: role.memory for name, role in config.trained_roles.items()}
    problems += check_fsdp(config.parallel, memories)
    if config.reward_model.path:
        problems += _check_budget(config, "reward_model", config.reward_model)
    problems += _check_lora(config)
    problems += _check_ratio(config)
    problems += check_algorithm(config)
    problems += check_kl_rules(config)
    if rollout.engine == "megatron":
        problems += _check_megatron_engine(config)
    problems += check_servers(config)
    if rollout.timeout_s >= config.trainer.distributed_timeout_s:
        problems.append(
            f"rollout.timeout_s is {rollout.timeout_s:g}: the other ranks wait in a collective for "
            "an engine that hangs, so it must be under trainer.distributed_timeout_s "
            f"({config.trainer.distributed_timeout_s:g}); lower it, or raise that"
        )
    if config.watchdog.timeout_s >= config.trainer.distributed_timeout_s:
        problems.append(
            f"watchdog.timeout_s is {config.watchdog.timeout_s:g}: a collective fails after "
            f"trainer.distributed_timeout_s ({config.trainer.distributed_timeout_s:g}), and a hang "
            "must be seen before; lower it, raise that, or set it to 0"
        )
    algorithm, samples = config.algorithm, data.train_batch_size * rollout.n
    if algorithm.kl_ctrl == "adaptive":
        if not algorithm.kl_coef:
            problems.append(
                "algorithm.kl_coef is 0: an adaptive coefficient is multiplied; start over 0"
            )
        if samples >= 5 * algorithm.horizon:
            problems.append(
                f"algorithm.horizon is {algorithm.horizon}: with {samples} samples a step it must "
                f"be over {samples / 5:g}, or kl_coef could reach 0"
            )
        if not algorithm.use_kl_in_reward:
            problems.append(
                "algorithm.kl_ctrl is 'adaptive': it steers the KL in the reward; set "
                "algorithm.use_kl_in_reward=true"
            )
    return problems


def _check_ratio(config: Config) -> list[str]:
    """Engine log-probs may stand in a ratio only where they are those of the trainer's softmax.

    With top_p, top_k or min_p tokens are drawn with their share of the kept tokens' probability. To
    that, the trainer's is a ratio of the kept mass for a policy that did not change; what an engine
    reports of it is its own affair.
    """
    rollout, algorithm = config.rollout, config.algorithm
    problems = []
    used = {
        "actor.use_rollout_log_probs": (config.actor.use_rollout_log_probs, "false"),
        "algorithm.rollout_is": (algorithm.rollout_is, "none"),
        "algorithm.rollout_rs": (algorithm.rollout_rs, "none"),
    }
    for key, (value, off) in used.items():
        if rollout.truncates and value not in (False, "none"):
            problems.append(
                f"{key} is {value!r}: with rollout.top_p {rollout.top_p}, rollout.top_k "
                f"{rollout.top_k} and rollout.min_p {rollout.min_p} tokens are drawn from those "
                "that are kept alone, and a ratio of the trainer's log-probs to the engine's is "
                "not that of the draw; set rollout.top_p=1, rollout.top_k=-1 and rollout.min_p=0, "
                f"or {key}={off}"
            )
    if config.actor.use_rollout_log_probs and algorithm.rollout_is != "none":
        problems.append(
            f"algorithm.rollout_is is {algorithm.rollout_is!r}: with actor.use_rollout_log_probs "
            "the ratio is against the engine already, and weights would correct twice; set one of "
            "them off"
        )
    return problems


def _check_budget(
    config: Config, name: str, role: ActorSection | CriticSection | RewardModelSection
) -> list[str]:
    """A token budget must hold the longest sample that the data and the rollouts can bring."""
    if not role.use_dynamic_bsz:
        return []
    if not config.parallel.packed:
        return [
            f"{name}.use_dynamic_bsz is True: a token budget is for packed sequences; set "
            "parallel.packed=true"
        ]
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    budget = role.max_token_len_per_gpu * config.parallel.cp
    if longest <= budget:
        return []
    return [
        f"{name}.max_token_len_per_gpu is {role.max_token_len_per_gpu}: a sample of "
        f"data.max_prompt_length {config.data.max_prompt_length} + rollout.max_response_length "
        f"{config.rollout.max_response_length} = {longest} tokens must fit in one forward pass "
        f"(x CP {config.parallel.cp} = {budget}); raise it, or lower one of them"
    ]


def check_fsdp(layout: ParallelSection, memories: Mapping[str, MemorySection]) -> list[str]:
    """Megatron's FSDP shards whole weights over DP, and moves memory by itself.

    Args:
        layout: of the run.
        memories: section name -> memory settings of each trained model.
    """
    if not layout.fsdp:
        return []
    problems = [
        f"parallel.{name} is {getattr(layout, name)} and parallel.fsdp is True: fully sharded data "
        f"parallel is for whole models; set parallel.{name}=1 or parallel.fsdp=false"
        for name in ("tp", "pp", "vpp", "ep", "etp")
        if getattr(layout, name) > 1
    ]
    for name, memory in memories.items():
        problems += [
            f"{name}.memory.{part}_offload is True and parallel.fsdp is True: it frees weights by "
            f"itself; set {name}.memory.{part}_offload=false or parallel.fsdp=false"
            for part in ("param", "grad", "optimizer")
            if getattr(memory, f"{part}_offload")
        ]
    return problems


def _check_lora(config: Config) -> list[str]:
    """Adapters hang on whole shards of weights that Megatron's products read as they are."""
    return [
        f"{role}.lora.rank is {lora.rank} and {key} is {value!r}: adapters are not built for it; "
        f"set {role}.lora.rank=0 or {key}={off}"
        for role, lora in (("actor", config.actor.lora), ("critic", config.critic.lora))
        for key, value, off in (
            ("parallel.fsdp", config.parallel.fsdp, "false"),
            ("model.fp8", config.model.fp8, "none"),
        )
        if lora.rank and value not in (False, "none")
    ]


def _check_megatron_engine(config: Config) -> list[str]:
    """The in-process engine runs a whole model on each TP group, in step with nobody else."""
    layout = config.parallel
    wide = {
        name: size
        for name, size in (
            ("pp", layout.pp),
            ("vpp", layout.vpp),
            ("cp", layout.cp),
            ("ep", layout.ep),
        )
        if size > 1
    }
    wide_engine = (
        [
            f"rollout.tp is {config.rollout.tp}: rollout.engine megatron runs on the ranks that "
            "train, under parallel.tp; set rollout.tp=1, or rollout.engine=sglang"
        ]
        if config.rollout.tp > 1
        else []
    )
    problems = wide_engine + [
        f"parallel.{name} is {size}: rollout.engine megatron generates under tensor parallelism "
        f"alone; set parallel.{name}=1, or rollout.engine=sglang"
        for name, size in wide.items()
    ]
    if layout.expert_tp != layout.tp:
        problems.append(
            f"parallel.etp is {layout.etp} and parallel.tp {layout.tp}: rollout.engine megatron "
            "needs experts split as the rest is; set parallel.etp=0, or rollout.engine=sglang"
        )
    if layout.fsdp:
        problems.append(
            "parallel.fsdp is True: rollout.engine megatron needs whole weights on a TP group; set "
            "parallel.fsdp=false, or rollout.engine=sglang"
        )
    if config.model.fp8 != "none":
        problems.append(
            f"model.fp8 is {config.model.fp8!r}: rollout.engine megatron has no fp8 products; set "
            "model.fp8=none, or rollout.engine=sglang"
        )
    return problems


def check_device_features(config: Config, device: str, *, here: bool = True) -> list[str]:
    """Switches that `device` (cpu, cuda) lacks, and packages, if the run is to be `here`."""
    if device == "cuda":
        return _check_memory_saver(config) if here else []
    return check_cpu_features(config.model, config.parallel)


def check_cpu_features(model: ModelSection, layout: ParallelSection) -> list[str]:
    """Switches that a CPU does not have."""
    problems = []
    if model.fp8 != "none":
        problems.append(
            f"model.fp8 is {model.fp8!r}: fp8 products are Transformer Engine's, which "
            "needs CUDA; on a CPU set model.fp8=none"
        )
    if layout.fsdp:
        problems.append(
            "parallel.fsdp is True: Megatron's fully sharded data parallel needs CUDA; on a CPU "
            "set parallel.fsdp=false (optimizer state is sharded over DP without it too)"
        )
    return problems


def _check_memory_saver(config: Config) -> list[str]:
    if not config.rollout.sleep or importlib.util.find_spec("torch_memory_saver") is not None:
        return []
    return [
        "rollout.sleep is True: on CUDA the engine's memory is released by the package "
        "torch_memory_saver, which is not installed; pip install torch-memory-saver, or set "
        "rollout.sleep=false"
    ]
