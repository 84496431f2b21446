"""The section of the reward model: frozen, on the ranks that train, it scores whole rollouts."""

from __future__ import annotations

from dataclasses import dataclass

from megappo.config.fields import Problems, opt


@dataclass(frozen=True, kw_only=True)
class RewardModelSection:
    """In use where `path` is set; its score is added to that of the rules."""

    path: str = opt(
        "",
        "folder that megappo train-rm has written, or a Hugging Face sequence classifier with one "
        "label; empty: none",
        verl="reward_model.model.path",
    )
    weight: float = opt(1.0, "times its score")
    rule_weight: float = opt(
        1.0,
        "times the score of the row's rule; 0: rules are run and logged, and do not count",
    )
    micro_batch_size: int = opt(
        8, "samples a forward pass on one DP rank", verl="reward_model.micro_batch_size_per_gpu"
    )
    use_dynamic_bsz: bool = opt(
        False, "fill forward passes up to a number of tokens instead of samples",
        verl="reward_model.use_dynamic_bsz",
    )  # fmt: skip
    max_token_len_per_gpu: int = opt(
        16384, "with use_dynamic_bsz: most tokens of a forward pass on one rank",
        verl="reward_model.forward_max_token_len_per_gpu",
    )  # fmt: skip
    param_offload: bool = opt(
        False, "weights stay in host memory while the model is not in use",
        verl="reward_model.megatron.param_offload",
    )  # fmt: skip

    def __post_init__(self) -> None:
        p = Problems()
        p.positive(
            weight=self.weight,
            micro_batch_size=self.micro_batch_size,
            max_token_len_per_gpu=self.max_token_len_per_gpu,
        )
        p.not_negative(rule_weight=self.rule_weight)
        p.done()
