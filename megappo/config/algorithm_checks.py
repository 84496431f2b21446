"""Rules between the estimator of advantages and the other sections."""

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
    if not traits.uses_critic:
        problems += _check_no_critic(config)
    return problems


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
