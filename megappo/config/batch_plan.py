"""The batch arithmetic of a world size. No device, no model, no file is touched.

One mini-batch (`actor.mini_batch_size` prompts over all ranks) is one optimizer step; one
micro-batch is one forward pass on one data-parallel (DP) rank and counts samples, i.e. prompts x
`rollout.n`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megappo.config.layout import ParallelSection
from megappo.config.learning import ActorSection, CriticSection
from megappo.config.sections import Config
from megappo.config.servers import check_number_of_servers


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The numbers that follow from a config and a world size."""

    world_size: int
    tp: int
    pp: int
    vp: int
    cp: int
    ep: int
    etp: int
    dp: int
    rollout_tp: int
    num_servers: int
    """of others, in place of engines of our own; 0: none"""
    prompts_per_step: int
    samples_per_step: int
    prompts_per_dp_rank: int
    samples_per_dp_rank: int
    optimizer_steps_per_step: int
    samples_per_mini_batch_and_dp_rank: int
    actor_micro_batches: str
    """how a mini-batch is cut, in words"""
    critic_micro_batches: str
    """empty without a critic"""

    def lines(self) -> list[str]:
        """What is printed at the start of a run."""
        chunks = f" ({self.vp} chunks a stage)" if self.vp > 1 else ""
        spread = self.ep > 1 or self.etp != self.tp
        experts = f"; experts EP {self.ep} x ETP {self.etp}" if spread else ""
        return [
            f"parallel   {self.world_size} ranks = TP {self.tp} x PP {self.pp}{chunks} x CP "
            f"{self.cp} x DP {self.dp}{experts}",
            self._rollout_line(),
            f"batch      {self.prompts_per_step} prompts x n {_ratio(self)} = "
            f"{self.samples_per_step} samples a step; {self.prompts_per_dp_rank} prompts, "
            f"{self.samples_per_dp_rank} samples a DP rank",
            f"updates    {self.optimizer_steps_per_step} optimizer steps a step; a mini-batch is "
            f"{self.samples_per_mini_batch_and_dp_rank} samples a DP rank; "
            f"micro-batches: actor {self.actor_micro_batches}, "
            + (f"critic {self.critic_micro_batches}" if self.critic_micro_batches else "no critic"),
        ]

    def _rollout_line(self) -> str:
        if self.num_servers:
            servers = "server" if self.num_servers == 1 else "servers"
            return f"rollout    {self.num_servers} {servers} for {self.world_size} ranks"
        return f"rollout    {self.world_size // self.rollout_tp} engines of TP {self.rollout_tp}"


def _ratio(plan: BatchPlan) -> int:
    return plan.samples_per_step // plan.prompts_per_step


def plan_batches(
    config: Config, world_size: int, *, local_world_size: int | None = None
) -> tuple[BatchPlan | None, list[str]]:
    """The batch arithmetic of a world size, or the rules that it breaks, with the numbers.

    Args:
        config: of the run.
        world_size: ranks in all.
        local_world_size: ranks of a node; None where all are on one.
    """
    layout = config.parallel
    model_ranks = layout.tp * layout.pp * layout.cp
    dp = world_size // model_ranks
    problems = check_world_size(layout, world_size)
    divides = not problems
    if world_size > 0:
        local = local_world_size or world_size
        problems += _check_rollout_groups(config.rollout.tp, world_size, local)
        problems += check_number_of_servers(config.rollout.url, world_size)
    if divides:
        problems += _check_batch(config, dp, model_ranks)
    if problems:
        return None, problems
    n = config.rollout.n
    prompts = config.data.train_batch_size
    mini = config.actor.mini_batch_size * n // dp
    plan = BatchPlan(
        world_size=world_size,
        tp=layout.tp,
        pp=layout.pp,
        vp=layout.vpp,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.expert_tp,
        dp=dp,
        rollout_tp=config.rollout.tp,
        num_servers=len(config.rollout.url),
        prompts_per_step=prompts,
        samples_per_step=prompts * n,
        prompts_per_dp_rank=prompts // dp,
        samples_per_dp_rank=prompts * n // dp,
        optimizer_steps_per_step=prompts // config.actor.mini_batch_size * config.actor.ppo_epochs,
        samples_per_mini_batch_and_dp_rank=mini,
        actor_micro_batches=_cut_in_words(config.actor, mini),
        critic_micro_batches=_cut_in_words(config.critic, mini) if config.uses_critic else "",
    )
    return plan, []


def check_world_size(layout: ParallelSection, world_size: int) -> list[str]:
    """Whether a layout divides the ranks; the rules that it breaks, with the numbers."""
    if world_size < 1:
        return [f"world size is {world_size}: start at least one rank"]
    problems = []
    model_ranks = layout.tp * layout.pp * layout.cp
    degrees = f"TP {layout.tp} x PP {layout.pp} x CP {layout.cp} = {model_ranks}"
    if world_size % model_ranks:
        problems.append(
            f"parallel: {world_size} ranks cannot be split by {degrees}: the world size must be a "
            f"multiple of it (TP x PP x CP x DP); start {model_ranks} or a multiple, "
            "or change parallel.*"
        )
    expert_ranks = layout.expert_tp * layout.ep * layout.pp
    split_otherwise = layout.ep > 1 or layout.expert_tp != layout.tp
    if split_otherwise and world_size % expert_ranks:
        problems.append(
            f"parallel: {world_size} ranks cannot be split by ETP {layout.expert_tp} x EP "
            f"{layout.ep} x PP {layout.pp} = {expert_ranks}, as the experts need it; start a "
            "multiple of it, or change parallel.ep or parallel.etp"
        )
    return problems


def _check_rollout_groups(tp: int, world_size: int, local_world_size: int) -> list[str]:
    """An engine has `tp` consecutive ranks, and all of them on one node."""
    if world_size % tp:
        return [
            f"rollout.tp is {tp}: {world_size} ranks cannot be split into engines of {tp} ranks "
            f"each; start a multiple of {tp}, or choose a rollout.tp that divides {world_size}"
        ]
    if local_world_size % tp:
        return [
            f"rollout.tp is {tp}: a node has {local_world_size} ranks, so some engine would lie on "
            f"two nodes; choose a rollout.tp that divides {local_world_size}"
        ]
    return []


def _cut_in_words(role: ActorSection | CriticSection, samples: int) -> str:
    if role.use_dynamic_bsz:
        return f"up to {role.max_token_len_per_gpu} tokens a rank"
    return f"{samples // role.micro_batch_size} of {role.micro_batch_size} samples"


def _check_batch(config: Config, dp: int, model_ranks: int) -> list[str]:
    n, mini = config.rollout.n, config.actor.mini_batch_size
    if mini % dp:
        problems = [
            f"actor.mini_batch_size is {mini}: {mini} prompts cannot be shared out evenly over DP "
            f"{dp} (data.train_batch_size {config.data.train_batch_size}, rollout.n {n}); make it "
            f"a multiple of {dp}"
        ]
    else:
        problems = _check_micro_batches(config, mini * n // dp, dp)
    samples = config.data.train_batch_size * n // dp
    if samples < model_ranks:
        problems.append(
            f"data.train_batch_size is {config.data.train_batch_size}: {samples} samples a DP rank "
            f"leave some of its {model_ranks} model-parallel ranks without a prompt to generate for"
        )
    return problems


def _check_micro_batches(config: Config, per_rank: int, dp: int) -> list[str]:
    """Whether they divide the `per_rank` samples that a mini-batch has on a DP rank."""
    problems: list[str] = []
    n, mini, layout = config.rollout.n, config.actor.mini_batch_size, config.parallel
    for name, role in config.trained_roles.items():
        micro = role.micro_batch_size
        if role.use_dynamic_bsz:
            continue
        if per_rank % micro:
            problems.append(
                f"{name}.micro_batch_size is {micro}: it must divide the {per_rank} samples that a "
                f"mini-batch has on one DP rank (actor.mini_batch_size {mini} x rollout.n {n} / DP "
                f"{dp})"
            )
        elif layout.vpp > 1 and per_rank // micro % layout.pp:
            problems.append(
                f"{name}.micro_batch_size is {micro}: the {per_rank // micro} micro-batches of a "
                f"mini-batch must be a multiple of parallel.pp ({layout.pp}) with parallel.vpp "
                f"{layout.vpp}; choose another micro_batch_size, or {name}.use_dynamic_bsz=true"
            )
    return problems
