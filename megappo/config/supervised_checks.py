"""Rules between the sections of a `SupervisedConfig`, and its batch arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from megappo.config.checks import check_fsdp
from megappo.config.supervised import SupervisedConfig
from megappo.config.tracking import check_loggers


@dataclass(frozen=True, kw_only=True)
class SupervisedPlan:
    """The numbers that follow from a config and a world size."""

    world_size: int
    tp: int
    pp: int
    vp: int
    cp: int
    ep: int
    etp: int
    dp: int
    batch: int
    """pairs or rows a step"""
    batch_per_dp_rank: int
    what: str
    """`pairs` or `rows`"""
    micro_batches: str
    """in words"""

    def lines(self) -> list[str]:
        """What is printed at the start of a run."""
        chunks = f" ({self.vp} chunks a stage)" if self.vp > 1 else ""
        spread = self.ep > 1 or self.etp != self.tp
        experts = f"; experts EP {self.ep} x ETP {self.etp}" if spread else ""
        return [
            f"parallel   {self.world_size} ranks = TP {self.tp} x PP {self.pp}{chunks} x CP "
            f"{self.cp} x DP {self.dp}{experts}",
            f"batch      {self.batch} {self.what} a step, {self.batch_per_dp_rank} a DP rank; "
            f"micro-batches: {self.micro_batches}",
        ]


def check_supervised(config: SupervisedConfig) -> list[str]:
    """Broken rules that need no world size."""
    problems: list[str] = []
    data, training = config.data, config.training
    if not config.model.path:
        problems.append("model.path is '': name the Hugging Face folder to start from")
    if not data.train_files:
        problems.append("data.train_files is []: name at least one Parquet file")
    if (config.trainer.test_freq or config.trainer.val_before_train) and not data.val_files:
        problems.append(
            "data.val_files is []: name a file, or set trainer.test_freq=0 and "
            "trainer.val_before_train=false"
        )
    problems += check_loggers(config.loggers)
    if config.task == "sft":
        problems += [
            f"{key} is {value!r}: it is for reward models (task: rm); leave it out"
            for key, value in (
                ("data.margin_key", data.margin_key),
                ("training.center_coef", training.center_coef),
            )
            if value
        ]
    if training.use_dynamic_bsz:
        problems += _check_budget(config)
    problems += check_fsdp(config.parallel, {})
    if config.watchdog.timeout_s >= config.trainer.distributed_timeout_s:
        problems.append(
            f"watchdog.timeout_s is {config.watchdog.timeout_s:g}: a collective fails after "
            f"trainer.distributed_timeout_s ({config.trainer.distributed_timeout_s:g}), and a hang "
            "must be seen before; lower it, raise that, or set it to 0"
        )
    return problems


def _check_budget(config: SupervisedConfig) -> list[str]:
    if not config.parallel.packed:
        return [
            "training.use_dynamic_bsz is True: a token budget is for packed sequences; set "
            "parallel.packed=true"
        ]
    answers = 2 if config.task == "rm" else 1
    longest = answers * config.data.max_length
    budget = config.training.max_token_len_per_gpu * config.parallel.cp
    if longest <= budget:
        return []
    return [
        f"training.max_token_len_per_gpu is {config.training.max_token_len_per_gpu}: {answers} x "
        f"data.max_length {config.data.max_length} = {longest} tokens must fit in one forward pass "
        f"(x CP {config.parallel.cp} = {budget}); raise it, or lower data.max_length"
    ]


def plan_supervised(
    config: SupervisedConfig, world_size: int
) -> tuple[SupervisedPlan | None, list[str]]:
    """The batch arithmetic of a world size, or the rules that it breaks, with the numbers."""
    layout, training = config.parallel, config.training
    if world_size < 1:
        return None, [f"world size is {world_size}: start at least one rank"]
    for ranks, degrees in (
        (layout.tp * layout.pp * layout.cp, f"TP {layout.tp} x PP {layout.pp} x CP {layout.cp}"),
        (
            layout.expert_tp * layout.ep * layout.pp,
            f"ETP {layout.expert_tp} x EP {layout.ep} x PP {layout.pp}",
        ),
    ):
        if world_size % ranks:
            return None, [
                f"parallel: {world_size} ranks cannot be split by {degrees} = {ranks}: start "
                f"{ranks} or a multiple, or change parallel.*"
            ]
    dp = world_size // (layout.tp * layout.pp * layout.cp)
    batch, what = config.data.train_batch_size, "pairs" if config.task == "rm" else "rows"
    if batch % dp:
        return None, [
            f"data.train_batch_size is {batch}: {batch} {what} cannot be shared out evenly over DP "
            f"{dp}; make it a multiple of {dp}"
        ]
    share, micro = batch // dp, training.micro_batch_size
    if not training.use_dynamic_bsz:
        problem = _check_micro(config, share)
        if problem:
            return None, [problem]
    plan = SupervisedPlan(
        world_size=world_size,
        tp=layout.tp,
        pp=layout.pp,
        vp=layout.vpp,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.expert_tp,
        dp=dp,
        batch=batch,
        batch_per_dp_rank=share,
        what=what,
        micro_batches=(
            f"up to {training.max_token_len_per_gpu} tokens a rank"
            if training.use_dynamic_bsz
            else f"{share // micro} of {micro} {what}"
        ),
    )
    return plan, []


def _check_micro(config: SupervisedConfig, share: int) -> str:
    """What is wrong with a fixed micro-batch size, or nothing."""
    micro, layout = config.training.micro_batch_size, config.parallel
    if share % micro:
        return (
            f"training.micro_batch_size is {micro}: it must divide the {share} that a batch has "
            f"on one DP rank (data.train_batch_size {config.data.train_batch_size})"
        )
    if layout.vpp > 1 and share // micro % layout.pp:
        return (
            f"training.micro_batch_size is {micro}: the {share // micro} micro-batches of a batch "
            f"must be a multiple of parallel.pp ({layout.pp}) with parallel.vpp {layout.vpp}; "
            "choose another, or training.use_dynamic_bsz=true"
        )
    return ""
