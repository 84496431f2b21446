"""Rules that watch a run: when they hold, what they decide, what the config refuses."""

import math

import pytest

from megappo.config.guard import DEFAULT_RULES, PPO_UPDATE_METRICS, GuardRule, GuardSection
from megappo.trainer.guard import Guard, StepAbandoned, holds
from tests.unit.trainer.test_parts import planner


def guard(**rules) -> Guard:
    return Guard(settings=GuardSection(rules=rules or dict(DEFAULT_RULES)), comparable=True)


def update(norm, loss=0.5, role="actor"):
    return {f"{role}/grad_norm": norm, "actor/loss" if role == "actor" else "critic/vf_loss": loss}


@pytest.mark.parametrize(
    ("condition", "value", "expected"),
    [
        ({"above": 0.2}, 0.21, True),
        ({"above": 0.2}, 0.2, False),
        ({"above": 0.2}, math.nan, False),
        ({"above": 0.2}, math.inf, False),
        ({"below": -1.0}, -1.5, True),
        ({"below": -1.0}, -1.0, False),
        ({"below": -1.0}, -math.inf, False),
        ({"non_finite": True}, math.nan, True),
        ({"non_finite": True}, -math.inf, True),
        ({"non_finite": True}, 1e300, False),
    ],
)
def test_a_condition_holds_on_its_own_side_of_its_value(condition, value, expected):
    assert holds(GuardRule(metrics=["m"], **condition), value) is expected


def test_a_healthy_run_is_let_through_and_counts_nothing():
    made = guard()
    assert made.admit(1, update(4.9))
    assert made.admit(1, update(900.0, role="critic"))
    assert made.after_step(1, {"actor/ppo_kl": 0.19, "actor/grad_norm": 4.0}) == []
    assert not made.in_doubt


@pytest.mark.parametrize(
    "figures",
    [
        update(math.nan),
        update(1.0, math.inf),
        update(math.inf, math.nan),
        update(math.nan, 1.0, "critic"),
    ],
)
def test_an_update_that_is_not_finite_is_skipped_with_one_event(figures):
    made = guard()
    assert not made.admit(3, figures, detail="which")
    (decision,) = made.after_step(3, {})
    assert (decision.rule, decision.action, decision.step) == ("non_finite", "skip_update", 3)
    assert decision.detail == "which"
    assert made.admit(3, update(1.0))
    assert made.after_step(3, {}) == []


def test_the_third_update_in_a_row_that_is_not_finite_goes_back():
    made = guard()
    assert not made.admit(1, update(math.nan))
    assert not made.admit(1, update(math.nan))
    assert made.admit(2, update(1.0))
    for _ in range(2):
        assert not made.admit(2, update(math.nan))
    assert len(made.take_decided()) == 4
    with pytest.raises(StepAbandoned, match=r"not finite for 3 steps \(guard\.rules\.non_finite_"):
        made.admit(2, update(math.nan))
    assert [d.action for d in made.take_decided()] == ["skip_update"]


def test_a_state_is_in_doubt_once_something_bad_was_written():
    made = guard(
        nan=GuardRule(metrics=["actor/loss"], non_finite=True, for_steps=3, action="roll_back"),
        norm=GuardRule(metrics=["actor/grad_norm"], above=5, for_steps=3, action="roll_back"),
        look=GuardRule(metrics=["actor/grad_norm"], above=1, for_steps=9, action="warn"),
    )
    assert made.admit(1, update(2.0, math.nan))
    assert not made.in_doubt
    assert made.admit(1, update(6.0))
    assert made.in_doubt
    assert made.admit(1, update(2.0))
    assert not made.in_doubt


def test_updates_of_the_other_role_do_not_break_a_row():
    made = guard()
    for _ in range(2):
        assert not made.admit(1, update(math.nan, math.nan))
        assert made.admit(1, update(1.0, role="critic"))
    with pytest.raises(StepAbandoned) as raised:
        made.admit(1, update(math.nan))
    assert raised.value.decision.action == "roll_back"


def test_a_gradient_norm_over_the_limit_abandons_the_step_before_it_is_applied():
    with pytest.raises(StepAbandoned, match=r"actor/grad_norm was 5\.1, above 5") as raised:
        guard().admit(7, update(5.1))
    assert raised.value.decision.spec is DEFAULT_RULES["grad_norm"]


def test_the_mean_gradient_norm_of_a_step_is_not_judged_again():
    assert guard().after_step(1, {"actor/grad_norm": 50.0, "actor/loss": math.nan}) == []


def test_a_rule_for_k_steps_needs_them_in_a_row():
    made = guard(low=GuardRule(metrics=["s"], below=0.1, for_steps=2, action="save_and_stop"))
    found = [bool(made.after_step(i, {"s": s})) for i, s in enumerate([0.0, 0.2, 0.0, 0.0, 0.0])]
    assert found == [False, False, False, True, False]


def test_a_metric_that_a_step_lacks_leaves_the_row_as_it_is():
    made = guard(val=GuardRule(metrics=["val/score/mean"], below=0.1, for_steps=2, action="warn"))
    assert made.after_step(1, {"val/score/mean": 0.0}) == []
    assert made.after_step(2, {}) == []
    assert len(made.after_step(3, {"val/score/mean": 0.0})) == 1


def test_counts_survive_a_checkpoint_and_rules_that_are_gone_are_forgotten():
    made = guard()
    made.admit(1, update(math.nan))
    made.num_actions = 4
    after = guard()
    after.load_state_dict(made.state_dict() | {"streaks": made.streaks | {"gone:m": 2}})
    assert after.state_dict() == made.state_dict()


def test_a_row_of_a_metric_that_a_rule_no_longer_watches_is_forgotten():
    rule = GuardRule(metrics=["m"], above=1.0, for_steps=2, action="roll_back")
    made = guard(**{"a:b": rule})
    made.after_step(1, {"m": 2.0})
    assert made.in_doubt
    other = guard(**{"a:b": GuardRule(metrics=["n"], above=1.0, for_steps=2, action="roll_back")})
    other.load_state_dict(made.state_dict())
    assert not other.in_doubt
    same = guard(**{"a:b": rule})
    same.load_state_dict(made.state_dict())
    assert same.in_doubt


def test_a_rule_over_a_metric_that_no_step_has_is_told():
    made = guard(typo=GuardRule(metrics=["actor/ppo_lk", "val/x"], above=0.2))
    assert made.unknown_metrics({"actor/ppo_kl": 0.0}, of_updates=PPO_UPDATE_METRICS) == [
        "guard.rules.typo watches actor/ppo_lk, which the first step does not have"
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metrics": []}, "name at least one metric"),
        ({"metrics": ["m"], "above": None}, "one condition of above, below and non_finite, not 0"),
        ({"metrics": ["m"], "below": 1.0}, "not 2"),
        ({"metrics": ["m"], "for_steps": 0}, "for_steps is 0"),
        ({"metrics": ["m"], "action": "lower_lr"}, "it takes to or factor, not nothing"),
        ({"metrics": ["m"], "action": "lower_lr", "to": 1e-6, "factor": 0.5}, "not to and factor"),
        (
            {"metrics": ["m"], "action": "lower_lr", "factor": 2.0},
            r"lower_lr needs one in \(0, 1\)",
        ),
        ({"metrics": ["m"], "action": "raise_kl_coef", "factor": 0.5}, "it must be over 1"),
        ({"metrics": ["m"], "action": "warn", "to": 1.0}, "neither to nor factor, not to"),
        ({"metrics": ["actor/ppo_kl"], "action": "skip_update"}, "known before the update writes"),
        ({"metrics": ["out_of_memory"], "action": "warn"}, "halve_micro_batch or none"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GuardRule(**({"above": 1.0} | settings))


def test_a_rule_that_is_switched_off_is_neither_checked_nor_judged():
    made = guard(grad_norm=GuardRule(action="none"))
    assert made.admit(1, update(1e9))


def test_forward_passes_are_halved_down_to_one_sample_or_the_longest_one():
    made = planner(micro_batch=6)
    sizes = []
    while made is not None:
        sizes.append(made.micro_batch)
        made = made.halved(10)
    assert sizes == [6, 3, 1]
    made = planner(max_tokens=100)
    assert made.halved(50).max_tokens == 50
    assert made.halved(51) is None


def test_a_salt_changes_every_seed_and_none_leaves_them_alone():
    from megappo.rollout.sampling import sample_seed

    place = {"step": 3, "row": 7, "sample": 2}
    seeds = [sample_seed(1, **place, salt=salt) for salt in range(4)]
    assert seeds[0] == sample_seed(1, **place)
    assert len(set(seeds)) == 4
    assert {seed % 2**16 for seed in seeds} == {2}


def test_a_warning_comes_once_and_again_only_when_it_gets_worse_or_begins_anew():
    """The peak of memory since the start never falls."""
    made = guard(m=GuardRule(metrics=["m"], above=0.9, action="warn"))
    shares = [0.8, 0.91, 0.91, 0.91, 0.95, 0.92, 0.95, 0.5, 0.91]
    found = [len(made.after_step(i, {"m": share})) for i, share in enumerate(shares)]
    assert found == [0, 1, 0, 0, 1, 0, 0, 0, 1]


def test_warnings_of_low_values_and_of_values_that_are_not_finite_come_once():
    made = guard(
        low=GuardRule(metrics=["m"], below=0.1, action="warn"),
        broken=GuardRule(metrics=["m"], non_finite=True, action="warn"),
    )
    values = [0.05, 0.06, 0.01, math.nan, math.inf, 0.05]
    found = [[d.rule for d in made.after_step(i, {"m": value})] for i, value in enumerate(values)]
    assert found == [["low"], [], ["low"], ["broken"], [], ["low"]]


def test_what_was_warned_of_is_no_state_of_the_run():
    made = guard(m=GuardRule(metrics=["m"], above=0.9, action="warn"))
    before = made.state_dict()
    assert len(made.after_step(1, {"m": 0.95})) == 1
    assert made.state_dict() == before | {"streaks": {"m:m": 0}}


def test_a_warning_that_asks_for_several_steps_waits_for_them_each_time_it_begins():
    made = guard(m=GuardRule(metrics=["m"], above=1.0, for_steps=2, action="warn"))
    values = [2.0, 2.0, 2.0, 2.0, 0.5, 2.0, 2.0]
    found = [len(made.after_step(i, {"m": value})) for i, value in enumerate(values)]
    assert found == [0, 1, 0, 0, 0, 0, 1]
