"""The sections of what is learned and how: advantages, optimizers, policy and value losses.

The other sections, and what they all have in common, stand in `sections.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megappo.config.estimators import ESTIMATORS, EstimatorTraits
from megappo.config.fields import Problems, opt, section
from megappo.config.layout import MemorySection
from megappo.config.lora import LoraSection

A = "actor_rollout_ref.actor."
C = "algorithm.rollout_correction."


@dataclass(frozen=True, kw_only=True)
class AlgorithmSection:
    """Advantages and the KL penalty inside the reward."""

    adv_estimator: Literal[
        "gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax"
    ] = opt(
        "gae",
        "how advantages are estimated; only gae needs a critic, and only with it one is built",
        verl="algorithm.adv_estimator",
    )
    gamma: float = opt(1.0, "discount a token, of gae and reinforce_pp", verl="algorithm.gamma")
    lam: float = opt(1.0, "GAE's lambda", verl="algorithm.lam")
    whiten_advantages: bool | None = opt(
        None,
        "advantages get mean 0 and variance 1 over all ranks: over all trained tokens (gae, "
        "reinforce_pp) or responses (reinforce_pp_baseline); null: yes for these three, and no "
        "other estimator allows it",
    )
    bootstrap_truncated: bool = opt(
        False, "a response cut at its length limit ends with the critic's value instead of 0"
    )
    use_kl_in_reward: bool = opt(
        False, "subtract kl_coef * KL from each token's reward", verl="algorithm.use_kl_in_reward"
    )
    kl_penalty: str = opt("kl", "kind of KL in the reward", verl="algorithm.kl_penalty")
    kl_ctrl: Literal["fixed", "adaptive"] = opt(
        "fixed", "adaptive steers kl_coef towards target_kl", verl="algorithm.kl_ctrl.type"
    )
    kl_coef: float = opt(0.001, "(initial) coefficient", verl="algorithm.kl_ctrl.kl_coef")
    target_kl: float = opt(
        0.1, "nats: mean over a sample's tokens", verl="algorithm.kl_ctrl.target_kl"
    )
    horizon: float = opt(10000.0, "samples; speed of control", verl="algorithm.kl_ctrl.horizon")
    filter_groups: bool = opt(
        False,
        "dynamic sampling: leave out prompts whose responses all have the same score, and draw "
        "others in their place",
        verl="algorithm.filter_groups.enable",
    )
    max_sampling_rounds: int = opt(
        10,
        "with filter_groups: batches of prompts that a step may draw; then groups of equal scores "
        "fill it up",
        verl="algorithm.filter_groups.max_num_gen_batches",
    )
    mask_truncated: bool = opt(
        False, "responses cut at their length limit count in no loss, and in no group"
    )
    rollout_is: Literal["none", "token", "sequence"] = opt(
        "none", "weigh the policy loss by trainer over engine probability, of a token or a sample",
        verl=C + "rollout_is",
    )  # fmt: skip
    rollout_is_threshold: float = opt(
        2.0, "largest weight of rollout_is", verl=C + "rollout_is_threshold"
    )
    rollout_rs: Literal["none", "token", "sequence"] = opt(
        "none", "leave out tokens, or samples, whose weight is outside [1 / threshold, threshold]",
        verl=C + "rollout_rs",
    )  # fmt: skip
    rollout_rs_threshold: float = opt(
        2.0, "largest weight that rollout_rs keeps", verl=C + "rollout_rs_threshold"
    )

    def __post_init__(self) -> None:
        p = Problems()
        p.within(0, 1, gamma=self.gamma, lam=self.lam)
        p.not_negative(kl_coef=self.kl_coef)
        p.positive(
            target_kl=self.target_kl,
            horizon=self.horizon,
            max_sampling_rounds=self.max_sampling_rounds,
        )
        p.require(
            not (self.mask_truncated and self.bootstrap_truncated),
            "mask_truncated", self.mask_truncated,
            "bootstrap_truncated trains on the responses that it leaves out; set one of them to "
            "false",
        )  # fmt: skip
        for name, value in (
            ("rollout_is_threshold", self.rollout_is_threshold),
            ("rollout_rs_threshold", self.rollout_rs_threshold),
        ):
            p.require(1 < value < math.inf, name, value, "it must be over 1 and finite; 2 is usual")
        _check_kl_kind(p, "kl_penalty", self.kl_penalty)
        self._check_estimator(p)
        p.done()

    @property
    def traits(self) -> EstimatorTraits:
        """What the estimator needs."""
        return ESTIMATORS[self.adv_estimator]

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened."""
        chosen = self.whiten_advantages
        return self.traits.whitens if chosen is None else chosen

    def _check_estimator(self, p: Problems) -> None:
        name, traits = self.adv_estimator, self.traits
        p.require(
            traits.may_whiten or not self.whiten_advantages,
            "whiten_advantages", self.whiten_advantages,
            f"with adv_estimator {name} the baseline is the prompt's own, and whitening over the "
            "batch would undo it; set it to null, or take reinforce_pp_baseline",
        )  # fmt: skip
        p.require(
            traits.discounts or self.gamma == 1, "gamma", self.gamma,
            f"adv_estimator {name} gives a whole response one advantage and discounts nothing; set "
            "gamma=1, or take gae or reinforce_pp",
        )  # fmt: skip
        p.require(
            traits.uses_critic or self.lam == 1, "lam", self.lam,
            f"adv_estimator {name} has no critic to weigh with; set lam=1, or adv_estimator=gae",
        )  # fmt: skip
        p.require(
            traits.uses_critic or not self.bootstrap_truncated,
            "bootstrap_truncated", self.bootstrap_truncated,
            f"adv_estimator {name} has no critic to take a value from; set it to false, or "
            "adv_estimator=gae",
        )  # fmt: skip


KL_KINDS = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")


def _check_kl_kind(p: Problems, field: str, kind: str) -> None:
    known = kind.removesuffix("+") in KL_KINDS
    p.require(known, field, kind, f"known: {', '.join(KL_KINDS)}, each also with a trailing '+'")


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """Adam with decoupled weight decay, in Megatron's DistributedOptimizer."""

    lr: float = opt(1e-6, "peak learning rate", verl="optim.lr")
    min_lr: float = opt(0.0, "rate at the end of the decay", verl="optim.min_lr")
    lr_warmup_steps: int = opt(0, "optimizer steps of linear warm-up", verl="optim.lr_warmup_steps")
    lr_decay_style: Literal["constant", "linear", "cosine"] = opt(
        "constant", "shape after the warm-up", verl="optim.lr_decay_style"
    )
    weight_decay: float = opt(
        0.01, "decay of matrices; norms and biases are spared", verl="optim.weight_decay"
    )
    beta1: float = opt(0.9, "Adam's first-moment decay")
    beta2: float = opt(0.95, "Adam's second-moment decay")
    eps: float = opt(1e-8, "Adam's epsilon")
    clip_grad: float = opt(1.0, "largest gradient norm; 0 does not clip", verl="grad_clip")

    def __post_init__(self) -> None:
        p = Problems()
        p.not_negative(
            lr=self.lr,
            min_lr=self.min_lr,
            lr_warmup_steps=self.lr_warmup_steps,
            weight_decay=self.weight_decay,
            clip_grad=self.clip_grad,
        )
        p.require(self.min_lr <= self.lr, "min_lr", self.min_lr, f"it is over lr ({self.lr})")
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            p.require(0 <= beta < 1, name, beta, "it must lie in [0, 1)")
        p.positive(eps=self.eps)
        p.done()


@dataclass(frozen=True, kw_only=True)
class ActorSection:
    """The policy's loss and its optimizer."""

    optim: OptimizerSection = section(OptimizerSection, "the actor's optimizer", verl=A)
    policy_loss: Literal["ppo", "gspo", "cispo", "sapo"] = opt(
        "ppo", "what is minimised: PPO's clip, its form for whole responses (GSPO), clipped "
        "importance weights (CISPO), a soft gate (SAPO)",
        verl=A + "policy_loss.loss_mode",
    )  # fmt: skip
    clip_ratio: float = opt(0.2, "PPO's epsilon, both sides", verl=A + "clip_ratio")
    clip_ratio_low: float | None = opt(
        None, "lower epsilon; clip_ratio if not set", verl=A + "clip_ratio_low"
    )
    clip_ratio_high: float | None = opt(
        None, "upper epsilon; clip_ratio if not set", verl=A + "clip_ratio_high"
    )
    clip_ratio_c: float = opt(
        3.0,
        "dual clip of policy_loss ppo: bound on the ratio where the advantage is negative",
        verl=A + "clip_ratio_c",
    )
    sapo_tau_pos: float = opt(
        1.0, "sapo: how fast its gate closes where the advantage is positive",
        verl=A + "policy_loss.tau_pos",
    )  # fmt: skip
    sapo_tau_neg: float = opt(
        1.05, "sapo: the same where it is negative", verl=A + "policy_loss.tau_neg"
    )
    entropy_coeff: float = opt(
        0.0, "entropy times this is subtracted from the loss", verl=A + "entropy_coeff"
    )
    use_kl_loss: bool = opt(
        True, "add kl_loss_coef * KL to the reference to the loss", verl=A + "use_kl_loss"
    )
    kl_loss_coef: float = opt(0.001, "coefficient of the KL loss", verl=A + "kl_loss_coef")
    kl_loss_type: str = opt("low_var_kl", "kind of KL in the loss", verl=A + "kl_loss_type")
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = opt(
        "token-mean", "what the loss is a mean of", verl=A + "loss_agg_mode"
    )
    use_rollout_log_probs: bool = opt(
        False, "the ratio is against the engine's log-probs instead of the trainer's old ones",
        verl=C + "bypass_mode",
    )  # fmt: skip
    ppo_epochs: int = opt(1, "passes over a step's samples", verl=A + "ppo_epochs")
    mini_batch_size: int = opt(
        64, "prompts an optimizer step, all ranks", verl=A + "ppo_mini_batch_size"
    )
    micro_batch_size: int = opt(
        8, "samples a forward pass on one DP rank", verl=A + "ppo_micro_batch_size_per_gpu"
    )
    use_dynamic_bsz: bool = opt(
        False, "fill forward passes up to a number of tokens instead of samples",
        verl=A + "use_dynamic_bsz",
    )  # fmt: skip
    max_token_len_per_gpu: int = opt(
        16384, "with use_dynamic_bsz: most tokens of a forward pass on one rank",
        verl=A + "ppo_max_token_len_per_gpu",
    )  # fmt: skip
    moe_aux_loss_coeff: float = opt(
        0.0, "weight of the experts' load-balancing loss, a mean over sequences; 0: none",
        verl=A + "megatron.override_transformer_config.moe_aux_loss_coeff",
    )  # fmt: skip
    memory: MemorySection = section(MemorySection, "device memory", verl=A + "megatron.")
    lora: LoraSection = section(LoraSection, "low-rank adapters", verl="actor_rollout_ref.model.")

    @property
    def clip_low(self) -> float:
        """Lower epsilon in force."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """Upper epsilon in force."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high

    def __post_init__(self) -> None:
        p = Problems()
        bounded = 0 < self.clip_low < 1 or (self.clip_low == 1 and self.policy_loss == "cispo")
        p.require(
            bounded, "clip_ratio_low", self.clip_low,
            "it must lie in (0, 1); with policy_loss cispo 1 is allowed too: no lower bound",
        )  # fmt: skip
        p.positive(sapo_tau_pos=self.sapo_tau_pos, sapo_tau_neg=self.sapo_tau_neg)
        p.positive(clip_ratio_high=self.clip_high)
        p.require(self.clip_ratio_c > 1, "clip_ratio_c", self.clip_ratio_c, "it must be over 1")
        p.not_negative(entropy_coeff=self.entropy_coeff, kl_loss_coef=self.kl_loss_coef)
        _check_kl_kind(p, "kl_loss_type", self.kl_loss_type)
        p.positive(
            ppo_epochs=self.ppo_epochs,
            mini_batch_size=self.mini_batch_size,
            micro_batch_size=self.micro_batch_size,
            max_token_len_per_gpu=self.max_token_len_per_gpu,
        )
        p.not_negative(moe_aux_loss_coeff=self.moe_aux_loss_coeff)
        p.done()


@dataclass(frozen=True, kw_only=True)
class CriticSection:
    """The value model: a model of its own with a scalar head."""

    path: str = opt("", "Hugging Face folder; the actor's if empty", verl="critic.model.path")
    optim: OptimizerSection = section(OptimizerSection, "the critic's optimizer", verl="critic.")
    cliprange_value: float = opt(
        0.5, "values move at most this far from the old ones; 0 does not clip",
        verl="critic.cliprange_value",
    )  # fmt: skip
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = opt(
        "token-mean", "what the loss is a mean of", verl="critic.loss_agg_mode"
    )
    micro_batch_size: int = opt(
        8, "samples a forward pass on one DP rank", verl="critic.ppo_micro_batch_size_per_gpu"
    )
    use_dynamic_bsz: bool = opt(
        False, "fill forward passes up to a number of tokens instead of samples",
        verl="critic.use_dynamic_bsz",
    )  # fmt: skip
    max_token_len_per_gpu: int = opt(
        16384, "with use_dynamic_bsz: most tokens of a forward pass on one rank",
        verl="critic.ppo_max_token_len_per_gpu",
    )  # fmt: skip
    moe_aux_loss_coeff: float = opt(
        0.0, "weight of the experts' load-balancing loss, a mean over sequences; 0: none"
    )
    memory: MemorySection = section(MemorySection, "device memory", verl="critic.megatron.")
    lora: LoraSection = section(LoraSection, "low-rank adapters", verl="critic.model.")

    def __post_init__(self) -> None:
        p = Problems()
        p.not_negative(
            cliprange_value=self.cliprange_value, moe_aux_loss_coeff=self.moe_aux_loss_coeff
        )
        p.positive(
            micro_batch_size=self.micro_batch_size,
            max_token_len_per_gpu=self.max_token_len_per_gpu,
        )
        p.done()


@dataclass(frozen=True, kw_only=True)
class ReferenceSection:
    """The frozen policy that KL is measured against; built only where a KL term is used."""

    path: str = opt("", "Hugging Face folder; the actor's if empty")
    param_offload: bool = opt(
        False, "weights stay in host memory while the model is not in use",
        verl="actor_rollout_ref.ref.megatron.param_offload",
    )  # fmt: skip
