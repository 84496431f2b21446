"""Rules between the estimator, the policy loss and the other sections, and what to warn of."""

from __future__ import annotations

from megappo.config.sections import Config


def check_algorithm(config: Config) -> list[str]:
    """Broken rules, each with the field, its value and a remedy."""
    name, traits, n = config.algorithm.adv_estimator, config.algorithm.traits, config.rollout.n
    problems = []
    if traits.compares_siblings and n < 2:
        problems.append(
            f"rollout.n is {n}: algorithm.adv_estimator {name} compares the responses to one "
            "prompt, and a single one would never teach anything; set rollout.n to 2 or more"
        )
    if config.algorithm.filter_groups and n < 2:
        problems.append(
            f"rollout.n is {n}: algorithm.filter_groups leaves out prompts whose responses have "
            "equal scores, as those of a single one always are; set rollout.n to 2 or more, or "
            "algorithm.filter_groups=false"
        )
    if config.algorithm.filter_groups and config.reward_model.path:
        problems.append(
            "algorithm.filter_groups is true: it leaves out prompts whose responses have equal "
            f"scores, and those of a reward model (reward_model.path {config.reward_model.path!r}) "
            "never are; set algorithm.filter_groups=false, or leave reward_model.path empty"
        )
    longest, buffer = config.rollout.max_response_length, config.reward.overlong_buffer
    if buffer > longest:
        problems.append(
            f"reward.overlong_buffer is {buffer}: it lies before rollout.max_response_length "
            f"({longest}), so it must be at most that; lower it"
        )
    if not traits.uses_critic:
        problems += _check_no_critic(config)
    return problems


def check_kl_rules(config: Config) -> list[str]:
    """Rules with the action raise_kl_coef, where there is no coefficient that it could raise."""
    algorithm, actor = config.algorithm, config.actor
    if actor.use_kl_loss and actor.kl_loss_coef > 0:
        return []
    why = "no KL is in use"
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl == "adaptive":
        why = "algorithm.kl_ctrl adaptive steers against what it would raise (lower target_kl)"
    elif algorithm.use_kl_in_reward and algorithm.kl_coef > 0:
        return []
    elif algorithm.use_kl_in_reward:
        why = "algorithm.kl_coef is 0, and times a factor it stays so"
    return [
        f"guard.rules.{name}.action is 'raise_kl_coef': {why}; set algorithm.use_kl_in_reward=true "
        "with kl_ctrl=fixed and a kl_coef over 0, or actor.use_kl_loss=true with a kl_loss_coef "
        "over 0"
        for name, rule in config.guard.rules.items()
        if rule.action == "raise_kl_coef"
    ]


def _check_no_critic(config: Config) -> list[str]:
    """What speaks of a critic that is not built."""
    name = config.algorithm.adv_estimator
    problems = [
        f"guard.rules.{rule_name}.role is {rule.role!r}: algorithm.adv_estimator {name} has no "
        "critic; set it to actor"
        for rule_name, rule in config.guard.rules.items()
        if rule.action == "lower_lr" and rule.role != "actor"
    ]
    if config.trainer.critic_warmup:
        problems.append(
            f"trainer.critic_warmup is {config.trainer.critic_warmup}: algorithm.adv_estimator "
            f"{name} has no critic, so nothing would be trained; set it to 0"
        )
    if config.critic.path:
        problems.append(
            f"critic.path is {config.critic.path!r}: algorithm.adv_estimator {name} has no critic; "
            "leave it empty, or set algorithm.adv_estimator=gae"
        )
    return problems


GSPO_CLIP = 0.01
"""A ratio of whole responses moves less than a token's: the paper clips at 3e-4 and 4e-4."""


def algorithm_warnings(config: Config) -> list[str]:
    """What is allowed and rarely meant."""
    actor, found = config.actor, []
    if config.algorithm.filter_groups and not config.trainer.total_steps:
        found.append(
            "algorithm.filter_groups is true and trainer.total_steps 0: a step draws several "
            "batches, so trainer.total_epochs counts steps and not passes over the data, of which "
            "there will be more; set trainer.total_steps"
        )
    if actor.use_kl_loss and actor.kl_loss_type in ("k1", "kl"):
        found.append(
            "actor.kl_loss_type k1 has a gradient of mean zero: as a loss it does not lower KL; "
            "use low_var_kl, k2 or low_var_kl+"
        )
    if actor.policy_loss == "gspo" and max(actor.clip_low, actor.clip_high) > GSPO_CLIP:
        found.append(
            f"actor.policy_loss gspo clips the ratio of whole responses at 1 - {actor.clip_low:g} "
            f"and 1 + {actor.clip_high:g}, which it hardly reaches; its paper has "
            "actor.clip_ratio_low=3e-4 actor.clip_ratio_high=4e-4"
        )
    if actor.policy_loss == "gspo" and actor.loss_agg_mode != "seq-mean-token-mean":
        found.append(
            f"actor.loss_agg_mode is {actor.loss_agg_mode}: actor.policy_loss gspo is the paper's "
            "with seq-mean-token-mean; otherwise long responses weigh more"
        )
    return found
